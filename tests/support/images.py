"""Image files made in memory."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from vlmpack.encode import ImagePart, Message, TextPart, VLMSample


def picture(width: int = 48, height: int = 32, *, seed: int = 0) -> Image.Image:
    """A smooth RGB picture without symmetry, kind to JPEG."""
    x = np.linspace(0, 200, width)[None, :, None]
    y = np.linspace(0, 50, height)[:, None, None]
    pixels = (x + y + np.array([0, 3, 5]) * (seed + 1)) % 256
    return Image.fromarray(pixels.astype(np.uint8))


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The image as an encoded file."""
    buffer = BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def conversation(*turns: tuple[str, list[str | None]], images: tuple[bytes, ...] = ()) -> VLMSample:
    """A sample from (role, parts); None stands for the next image."""
    count = 0
    messages = []
    for role, parts in turns:
        made: list[TextPart | ImagePart] = []
        for part in parts:
            if part is None:
                made.append(ImagePart(count))
                count += 1
            else:
                made.append(TextPart(part))
        messages.append(Message(role, tuple(made)))
    return VLMSample(key="made-up", url="memory", messages=tuple(messages), images=images)


def one_image(data: bytes) -> VLMSample:
    """A question about one image."""
    return conversation(("user", [None, "What is it?"]), ("assistant", ["7"]), images=(data,))
