"""The image formats that are read: everywhere the same, by what a file says it is, never its name.

Of a file of several frames or pages (GIF, WebP, TIFF) the first is the image.
"""

from __future__ import annotations

from collections.abc import Mapping

from PIL import Image

from vlmpack.errors import DataError

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Readers of Pillow's that may open a file."""

FORMATS_READ = "JPEG, PNG, WebP, GIF, BMP or TIFF"

_MAGIC: Mapping[bytes, str] = {
    b"\x89PNG": "png",
    b"RIFF": "webp",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tif",
    b"MM\0*": "tif",
}


def suffix_of(image: bytes) -> str:
    """How the file of an image that can be read is called."""
    return next((name for magic, name in _MAGIC.items() if image.startswith(magic)), "jpg")


def check_depth(image: Image.Image, which: str) -> None:
    """Raise DataError (decode) for a TIFF with 32 bits a pixel: nothing says which are black and
    white.

    Args:
        image: opened, not loaded.
        which: of the sample's images it is.
    """
    if image.format == "TIFF" and image.mode in ("I", "F"):
        kind = "floats" if image.mode == "F" else "integers"
        raise DataError(
            f"image {which} has pixels that are {kind} of 32 bits, without a scale; expected 8 or "
            "16 bits a channel",
            error_class="decode",
        )
