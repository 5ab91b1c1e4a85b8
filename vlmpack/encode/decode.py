"""An encoded image file -> upright RGB pixels."""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from PIL import Image, ImageOps

from vlmpack.encode.image_formats import IMAGE_FORMATS, check_depth
from vlmpack.encode.orientation import orientation_of, oriented_size
from vlmpack.errors import UNREADABLE, DataError


def which_image(index: int, names: Sequence[str]) -> str:
    """What a message calls an image: its place, and its name where it has one."""
    return f"{index} ({names[index]!r})" if index < len(names) else str(index)


def decode_image(data: bytes, which: int | str = 0, *, max_pixels: int) -> Image.Image:
    """Decode one image file to upright RGB.

    Args:
        data: the encoded file.
        which: image of the sample it is, for the message.
        max_pixels: larger images are refused from their header, before any pixel is decoded.

    Raises:
        DataError: (decode) unreadable, truncated or too large.
    """
    with _told_as(which):
        return to_rgb(ImageOps.exif_transpose(_opened(data, which, max_pixels)))


def size_of(data: bytes, which: int | str = 0, *, max_pixels: int) -> tuple[int, int]:
    """(width, height) of an image as `decode_image` would make it, from its header.

    Args: as of `decode_image`.

    Raises:
        DataError: (decode) a header that `decode_image` cannot read either, or too large.
    """
    with _told_as(which):
        image = _opened(data, which, max_pixels)
        return oriented_size(*image.size, orientation_of(image, data))


@contextmanager
def _told_as(which: int | str) -> Iterator[None]:
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


def _opened(data: bytes, which: int | str, max_pixels: int) -> Image.Image:
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
