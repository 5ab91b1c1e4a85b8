"""What an image's header says: size, format, orientation. No pixel is decoded.

The size that counts is the one after EXIF orientation, as the encoder decodes it.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from dataclasses import dataclass

from PIL import Image

from vlmpack.data.protocols import ImageSize
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.encode.decode import (
    FORMATS_READ,
    IMAGE_FORMATS,
    check_depth,
    orientation_of,
    oriented_size,
)
from vlmpack.errors import DataError, decode_error


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """One image as its header describes it: stored size, Pillow's format, and EXIF orientation (1
    to 8, where 5 to 8 swap width and height)."""

    width: int
    height: int
    format: str
    orientation: int

    @property
    def size(self) -> ImageSize:
        """(width, height) as the image is seen."""
        return oriented_size(self.width, self.height, self.orientation)


def image_digest(data: bytes) -> int:
    """Says which image file this is, byte for byte: 64 bits of BLAKE2b, signed."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def image_facts(data: bytes, field: str, caps: SampleCaps) -> ImageFacts:
    """The facts of one encoded image; the pixel limit applies to the header.

    Raises:
        DataError: class `decode`, for a header that cannot be read or an image above the cap.
    """
    try:
        with warnings.catch_warnings():
            # Pillow warns about large images, which the cap judges, and about damaged EXIF.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
                width, height = image.size
                kind = image.format or "?"
                _check_pixels(width, height, field, caps)
                check_depth(image, repr(field))
                orientation = orientation_of(image, data)
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise decode_error(
            f"image {field!r}: {error}; the cap is {caps.max_image_pixels} pixels"
        ) from error
    except Exception as error:  # hostile bytes raise anything in a decoder
        what = "is empty" if not data else f"begins with {data[:8]!r}"
        raise decode_error(
            f"image {field!r} has no readable {FORMATS_READ} header (it {what}): "
            f"{type(error).__name__}"
        ) from error
    return ImageFacts(width, height, kind, orientation)


def _check_pixels(width: int, height: int, field: str, caps: SampleCaps) -> None:
    if width * height > caps.max_image_pixels:
        raise decode_error(
            f"image {field!r} has {width} x {height} = {width * height} pixels; the cap is "
            f"{caps.max_image_pixels}"
        )
    if width < 1 or height < 1:
        raise decode_error(f"image {field!r} has no pixels")
