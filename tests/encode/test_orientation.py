"""Which way up an image is, from its header."""

from __future__ import annotations

import io

import pytest
from PIL import Image
from support.shard_fakes import image_bytes

from vlmpack.encode.decode import orientation_of, oriented_size


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
