"""An encoded image file -> upright RGB pixels."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence

from PIL import Image, ImageOps, UnidentifiedImageError

from vlmpack.errors import DataError


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
    try:
        with warnings.catch_warnings():
            # Pillow warns of large images (the cap is stricter) and of odd EXIF (it is ignored).
            warnings.simplefilter("ignore")
            return _decode_upright(data, which, max_pixels)
    except (
        UnidentifiedImageError,
        OSError,
        ValueError,
        SyntaxError,
        Image.DecompressionBombError,
    ) as error:
        raise DataError(
            f"image {which} cannot be decoded: {error}", error_class="decode"
        ) from error


def decode_images(
    files: Sequence[bytes],
    sizes: Sequence[tuple[int, int]] | None,
    names: Sequence[str],
    *,
    max_pixels: int,
) -> list[Image.Image]:
    """The images of a sample, upright RGB.

    Args:
        files: encoded, in token order.
        sizes: (width, height) to resize each to, where the plan shrank them.
        names: of the images, for messages.
        max_pixels: as of `decode_image`.

    Raises:
        DataError: as `decode_image`.
    """
    images = [
        decode_image(data, which_image(n, names), max_pixels=max_pixels)
        for n, data in enumerate(files)
    ]
    if sizes is None:
        return images
    return [
        image if image.size == tuple(size) else image.resize(size, Image.Resampling.BICUBIC)
        for image, size in zip(images, sizes, strict=True)
    ]


def _decode_upright(data: bytes, which: int | str, max_pixels: int) -> Image.Image:
    image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP"))
    if image.width * image.height > max_pixels:
        raise DataError(
            f"image {which} has {image.width} x {image.height} pixels, more than "
            f"data.max_image_pixels = {max_pixels}",
            error_class="decode",
        )
    return to_rgb(ImageOps.exif_transpose(image))


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
