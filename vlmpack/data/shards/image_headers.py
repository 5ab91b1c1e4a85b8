"""Sizes from plain JPEG and PNG headers, several times faster than by opening the image.

Only files whose every header byte is as most writers leave it, and whose orientation nothing can
turn: no EXIF, no XMP, no several pictures. All others, damaged ones among them, are left to Pillow,
and so is every error message. Where a size is found here, Pillow finds the same one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

_JPEG_START = b"\xff\xd8"
_PNG_START = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"

_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_SCAN = 0xDA
_PASSED_OVER = frozenset({0xC4, 0xDD, 0xFE})  # Huffman tables, restart interval, comment
_TABLES = 0xDB
_PICTURE_FORMAT = 0xE0
_PROFILE = 0xE2
_ADOBE = 0xEE
_CHANNELS = (1, 3, 4)

_PNG_KINDS = frozenset({(8, 0), (16, 0), (8, 2), (16, 2), (8, 4), (16, 4), (8, 6), (16, 6)})
_PNG_CHUNKS = {b"sRGB": 1, b"gAMA": 4, b"pHYs": 9}
_PNG_METADATA = frozenset({b"eXIf", b"tEXt", b"zTXt", b"iTXt"})

_LENGTH = struct.Struct(">H").unpack_from
_FRAME = struct.Struct(">BHHB").unpack_from
_CHUNK = struct.Struct(">I4s").unpack_from
_CHECKSUM = struct.Struct(">I").unpack_from
_PNG_HEADER = struct.Struct(">IIBBBBBI").unpack_from


class PlainHeader(NamedTuple):
    """Size and format of an image that is shown as it is stored.

    Args:
        width, height: of the stored pixels.
        format: Pillow's name.
    """

    width: int
    height: int
    format: str


def plain_header(data: bytes) -> PlainHeader | None:
    """What a plain header says; None where Pillow has to look, for whatever reason."""
    read: Callable[[bytes], PlainHeader | None]
    if data.startswith(_JPEG_START):
        read = _jpeg
    elif data.startswith(_PNG_START):
        read = _png
    else:
        return None
    try:
        return read(data)
    except struct.error:  # the file ends in its header
        return None


def _jpeg(data: bytes) -> PlainHeader | None:
    """Segment after segment to the first scan: FF, marker, length (2 bytes, counts itself)."""
    place, found, end = 2, None, len(data)
    while place + 4 <= end and data[place] == 0xFF:
        marker = data[place + 1]
        (length,) = _LENGTH(data, place + 2)
        begin, place = place + 4, place + 2 + length
        if length < 2 or place > end:
            return None
        if marker in _FRAMES:
            bits, height, width, channels = _FRAME(data, begin)
            wrong = bits != 8 or channels not in _CHANNELS or length != 8 + 3 * channels
            if wrong or found is not None or not width or not height:
                return None
            found = PlainHeader(width, height, "JPEG")
        elif marker == _SCAN:
            return found
        elif marker not in _PASSED_OVER and not _is_plain(marker, data, begin, place):
            return None
    return None


def _is_plain(marker: int, data: bytes, begin: int, end: int) -> bool:
    """Whether a segment's content is known to be harmless to the size."""
    if marker == _TABLES:
        while begin < end:
            begin += 65 if data[begin] < 16 else 129
        return begin == end
    if marker == _PICTURE_FORMAT:
        return end - begin >= 14 and data.startswith(b"JFIF\0", begin)
    if marker == _PROFILE:
        return end - begin >= 14 and data.startswith(b"ICC_PROFILE\0", begin)
    return marker == _ADOBE and end - begin >= 12 and data.startswith(b"Adobe", begin)


def _png(data: bytes) -> PlainHeader | None:
    """The header chunk, and the chunks before the first one of pixels; none that turns them."""
    width, height, bits, colours, _, filters, _, checksum = _PNG_HEADER(data, 16)
    if checksum != zlib.crc32(data[12:29]) or (bits, colours) not in _PNG_KINDS or filters:
        return None
    if not width or not height:
        return None
    place = 33
    while True:
        length, kind = _CHUNK(data, place)
        if kind == b"IDAT":
            return None if late_metadata(data) else PlainHeader(width, height, "PNG")
        if _PNG_CHUNKS.get(kind) != length:
            return None
        behind = place + 8 + length
        if _CHECKSUM(data, behind)[0] != zlib.crc32(data[place + 4 : behind]):
            return None
        place = behind + 4


def late_metadata(data: bytes) -> bool:
    """Whether a PNG has metadata behind its pixels."""
    place, pixels_seen = 8, False
    while place + 8 <= len(data):
        length, kind = _CHUNK(data, place)
        if kind == b"IDAT":
            pixels_seen = True
        elif pixels_seen and kind in _PNG_METADATA:
            return True
        place += 12 + int(length)
    return False
