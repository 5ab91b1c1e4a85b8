"""An image as a page holds it: small enough, inside the page, and made anew from its pixels."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from typing import NamedTuple

from PIL import Image

from vlmpack.encode.decode import IMAGE_FORMATS

MAX_SIDE = 640
MAX_PNG_PIXELS = 1 << 16
"""The largest side and the most pixels of an image that stays a PNG."""


class Thumbnail(NamedTuple):
    """An image in a page.

    Args:
        url: its data.
        size: (width, height) in pixels.
    """

    url: str
    size: tuple[int, int]


def thumbnail(image: Image.Image, max_side: int = MAX_SIDE) -> Thumbnail:
    """As it is, or smaller where the page would grow too large. Photos as JPEG; small images keep
    every pixel."""
    small, data = image.convert("RGB"), io.BytesIO()
    small.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    kind = "JPEG" if small.width * small.height > MAX_PNG_PIXELS else "PNG"
    small.save(data, kind, quality=85)
    encoded = base64.b64encode(data.getvalue()).decode("ascii")
    return Thumbnail(f"data:image/{kind.lower()};base64,{encoded}", small.size)


def thumbnails(files: Iterable[bytes], max_side: int = MAX_SIDE) -> tuple[str, ...]:
    """Addresses of encoded images; () where one of them cannot be read."""
    decoded = [decode(data) for data in files]
    return tuple(thumbnail(one, max_side).url for one in decoded if one) if all(decoded) else ()


def decode(data: bytes) -> Image.Image | None:
    """RGB, or None for an image that cannot be read: a page shows what it can."""
    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
