"""Which way up an image is, from its header."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from support.shard_fakes import image_bytes

from vlmpack.encode.decode import decode_image, orientation_of, oriented_size
from vlmpack.limits import MAX_IMAGE_PIXELS


@pytest.mark.parametrize("orientation", range(1, 9))
def test_sizes_swap_where_an_image_lies_on_its_side(orientation: int) -> None:
    data = image_bytes(30, 20, kind="JPEG", orientation=orientation)
    image = Image.open(io.BytesIO(data))
    assert orientation_of(image, data) == orientation
    assert oriented_size(30, 20, orientation) == ((20, 30) if orientation > 4 else (30, 20))


def test_no_pixel_of_a_png_is_decoded_for_it() -> None:
    data = image_bytes(30, 20)
    image = Image.open(io.BytesIO(data[: len(data) // 2]))
    assert orientation_of(image, data[: len(data) // 2]) == 1, "its pixels are cut off"


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_an_orientation_in_xmp_counts_as_one_in_exif(kind: str, orientation: int) -> None:
    """Size and pixels agree, so that a planned length is that of the decoded image."""
    xmp = f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'
    text = PngInfo()
    text.add_itxt("XML:com.adobe.xmp", xmp)
    form: dict[str, dict[str, Any]] = {
        "PNG": {"pnginfo": text},
        "TIFF": {"tiffinfo": {700: xmp.encode()}},
    }
    stream = io.BytesIO()
    Image.new("RGB", (30, 20)).save(stream, kind, **form.get(kind, {"xmp": xmp.encode()}))
    data = stream.getvalue()
    image = Image.open(io.BytesIO(data))
    assert orientation_of(image, data) == orientation
    upright = decode_image(data, max_pixels=MAX_IMAGE_PIXELS)
    assert upright.size == oriented_size(*image.size, orientation)
    assert (upright.size == image.size) == (orientation < 5)
