"""One conversation with images, as every cooking schema delivers it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class TextPart:
    """A run of text inside a message. `<image>` in it is plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """The place of one image: `index` counts the sample's images from 0, in token order."""

    index: int


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Args:
        role: whose it is.
        parts: what it says and shows, in order.
        learn: False where the data excludes an assistant's turn from the loss. The turns of others
            are never learnt.
    """

    role: Role
    parts: tuple[TextPart | ImagePart, ...]
    learn: bool = True

    @property
    def text(self) -> str:
        """The message's text parts, concatenated."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


def said(role: Role, text: str) -> Message:
    """A turn of words alone."""
    return Message(role, (TextPart(text),))


@dataclass(frozen=True, slots=True, kw_only=True)
class VLMSample:
    """One sample, cooked but not encoded.

    Args:
        key: the WebDataset key; unique within a shard.
        url: the shard it came from, for messages.
        messages: the turns, in order; image parts point into `images`.
        images: encoded image files (JPEG, PNG, WebP) as bytes, in token order. Empty while only
            text and image sizes are needed (lengths).
        image_names: what messages call the images: their members, or the files that they come from.
        task: a label that evaluation groups its figures by, if the data has one.
    """

    key: str
    url: str
    messages: tuple[Message, ...]
    images: tuple[bytes, ...] = ()
    task: str | None = None
    image_names: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_images(self) -> int:
        """Number of image parts in the messages."""
        return sum(isinstance(part, ImagePart) for m in self.messages for part in m.parts)
