"""An encoded image file -> upright RGB pixels.

A file's content decides its format, never its name. The first frame or page of a file (GIF, WebP,
TIFF) is the image. Its orientation is read from its header.
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from PIL import Image, ImageOps
from PIL.TiffImagePlugin import TiffImageFile

from vlmpack.errors import UNREADABLE, DataError

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
    """Raise DataError (decode) for a TIFF with 32 bits a pixel: black and white are unknown."""
    if image.format == "TIFF" and image.mode in ("I", "F"):
        kind = "floats" if image.mode == "F" else "integers"
        raise DataError(
            f"image {which} has pixels that are {kind} of 32 bits, without a scale; expected 8 or "
            "16 bits a channel",
            error_class="decode",
        )


_WIDTH, _HEIGHT, _ORIENTATION = 0x0100, 0x0101, 0x0112
_PNG_METADATA = frozenset({b"eXIf", b"tEXt", b"zTXt", b"iTXt"})


def oriented_size(width: int, height: int, orientation: int) -> tuple[int, int]:
    """(width, height) after the EXIF orientation."""
    return (height, width) if orientation >= 5 else (width, height)


def orientation_of(image: Image.Image, data: bytes) -> int:
    """EXIF's orientation of an opened image, 1 where there is none."""
    if image.format == "PNG" and "exif" not in image.info and not _has_late_metadata(data):
        # Pillow's PNG reader would decode every pixel to look for metadata after them.
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


def which_image(index: int, names: Sequence[str]) -> str:
    """What a message calls an image: its place, and its name where it has one."""
    return f"{index} ({names[index]!r})" if index < len(names) else str(index)


def decode_image(data: bytes, which: int | str = 0, *, max_pixels: int) -> Image.Image:
    """Decode one image file to upright RGB.

    Args:
        which: its place among the sample's images, for messages.
        max_pixels: larger images are refused from their header, before any pixel is decoded.

    Raises:
        DataError: (decode) unreadable, truncated or too large.
    """
    with _as_image_error(which):
        return to_rgb(ImageOps.exif_transpose(_open_image(data, which, max_pixels)))


def size_of(data: bytes, which: int | str = 0, *, max_pixels: int) -> tuple[int, int]:
    """(width, height) of an image as `decode_image` would make it, from its header.

    Args: as of `decode_image`.

    Raises:
        DataError: (decode) a header that `decode_image` cannot read either, or too large.
    """
    with _as_image_error(which):
        image = _open_image(data, which, max_pixels)
        return oriented_size(*image.size, orientation_of(image, data))


@contextmanager
def _as_image_error(which: int | str) -> Iterator[None]:
    """What a decoder raises, as an error of an image."""
    try:
        with warnings.catch_warnings():
            # Pillow warns of large images (the cap is stricter) and of odd EXIF (it is ignored).
            warnings.simplefilter("ignore")
            yield
    except (
        *UNREADABLE,
        EOFError,
        RuntimeError,
        SyntaxError,
        struct.error,
        Image.DecompressionBombError,
    ) as error:  # what decoders raise over hostile bytes
        raise DataError(
            f"image {which} cannot be decoded: {error}", error_class="decode"
        ) from error


def _open_image(data: bytes, which: int | str, max_pixels: int) -> Image.Image:
    """Its header alone is read."""
    image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    if image.width * image.height > max_pixels:
        raise DataError(
            f"image {which} has {image.width} x {image.height} pixels, more than "
            f"data.max_image_pixels = {max_pixels}",
            error_class="decode",
        )
    check_depth(image, str(which))
    return image


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB; transparent pixels are laid on white, 16-bit greys are scaled instead of clipped."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):
        return image.point(lambda value: value / 256).convert("L").convert("RGB")
    if "A" in image.mode or "transparency" in image.info:
        rgba = image.convert("RGBA")
        canvas = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(canvas, rgba).convert("RGB")
    return image.convert("RGB")
