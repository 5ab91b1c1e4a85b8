"""Images that a record holds as text: data URIs, and base64 alone.

    data:image/png;base64,iVBORw0KGgo...      by its scheme, whatever its length
    iVBORw0KGgoAAAANSUhEUgAA...               only where it cannot be a path

A text is base64 of an image if it is longer than 256 characters, has no character that base64 has
not, decodes to the last, and begins as a file of a format that is read. A path has a dot before its
suffix, which is none of base64's characters.
"""

from __future__ import annotations

import base64
import binascii
import re

from vlmpack.errors import schema_error

SHORTEST_BARE = 257
"""Characters of the shortest text that is taken for base64 without saying so."""

_MAGIC = (
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"RIFF",
    b"GIF87a",
    b"GIF89a",
    b"BM",
    b"II*\0",
    b"MM\0*",
)
"""How files of the formats that are read begin."""

_ALPHABET = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*", re.ASCII)
_SHOWN = 40


def inline_image(text: str, where: str) -> bytes | None:
    """The image file that a text is; None where it is a path.

    Args:
        text: of a record.
        where: its place, for messages.

    Raises:
        DataError: (schema) a data URI that is no image in base64.
    """
    if text[:5].lower() == "data:":
        return _of_uri(text, where)
    if len(text) < SHORTEST_BARE or not _ALPHABET.fullmatch(text):
        return None
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error:
        return None
    return data if begins_as_image(data) else None


def begins_as_inline(text: str) -> bool:
    """Whether a text begins as one that is an image; the rest of it may be damaged."""
    if text[:11].lower() == "data:image/":
        return True
    head = text[: SHORTEST_BARE - 1]
    if len(text) < SHORTEST_BARE or not _ALPHABET.fullmatch(head):
        return False
    bare = "".join(head.split())
    try:
        return begins_as_image(base64.b64decode(bare[: len(bare) // 4 * 4], validate=True))
    except binascii.Error:
        return False


def begins_as_image(data: bytes) -> bool:
    """Whether a file begins as those of the formats that are read."""
    return data.startswith(_MAGIC) and (data[:4] != b"RIFF" or data[8:12] == b"WEBP")


def _of_uri(text: str, where: str) -> bytes:
    head, comma, body = text.partition(",")
    kind, *parameters = head[5:].lower().split(";")
    if not comma or not kind.startswith("image/") or parameters[-1:] != ["base64"]:
        raise schema_error(
            f"{where} is the data URI {head[:_SHOWN]!r}; expected data:image/...;base64,..."
        )
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except binascii.Error as error:
        raise schema_error(f"{where} is a data URI whose base64 is damaged: {error}") from None
