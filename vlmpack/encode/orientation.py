"""Which way up an image is to be seen, from its header. No pixel is decoded."""

from __future__ import annotations

from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

_WIDTH, _HEIGHT, _ORIENTATION = 0x0100, 0x0101, 0x0112
_PNG_METADATA = frozenset({b"eXIf", b"tEXt", b"zTXt", b"iTXt"})


def oriented_size(width: int, height: int, orientation: int) -> tuple[int, int]:
    """(width, height) after the EXIF orientation."""
    return (height, width) if orientation >= 5 else (width, height)


def orientation_of(image: Image.Image, data: bytes) -> int:
    """EXIF's orientation of an opened image, 1 where there is none.

    Args:
        image: opened, not loaded.
        data: its file.
    """
    if image.format == "PNG" and "exif" not in image.info and not _has_late_metadata(data):
        # Pillow's PNG reader would decode every pixel to look for metadata behind them.
        exif = Image.Image.getexif(image)
    else:
        exif = image.getexif()
    if isinstance(image, TiffImageFile) and image.size != _stored_size(image):
        return 1  # Pillow turns a TIFF by itself, and says its size as it is seen
    value = exif.get(_ORIENTATION, 1)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _stored_size(image: TiffImageFile) -> tuple[object, object]:
    """(width, height) of the pixels in the file."""
    return image.tag_v2.get(_WIDTH), image.tag_v2.get(_HEIGHT)


def _has_late_metadata(png: bytes) -> bool:
    """Whether a PNG has metadata behind its pixels."""
    place, pixels_seen = 8, False
    while place + 8 <= len(png):
        kind = png[place + 4 : place + 8]
        if kind == b"IDAT":
            pixels_seen = True
        elif pixels_seen and kind in _PNG_METADATA:
            return True
        place += 12 + int.from_bytes(png[place : place + 4])
    return False
