"""The index and the families' decoder agree about every image: size, and what cannot be decoded."""

from __future__ import annotations

import io
import random
import warnings

import pytest
from PIL import Image
from support.shard_fakes import image_bytes

from vlmpack.data.shards.images import image_facts
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.encode import decode_image
from vlmpack.errors import DataError

PIXELS = 10_000


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_sizes_agree_for_every_orientation(kind: str, orientation: int) -> None:
    data = image_bytes(31, 17, kind=kind, orientation=orientation)
    assert decode_image(data, max_pixels=PIXELS).size == image_facts(data, "0", SampleCaps()).size


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("CMYK", "JPEG"),
        ("L", "JPEG"),
        ("I;16", "PNG"),
        ("P", "PNG"),
        ("RGBA", "PNG"),
        ("LA", "PNG"),
        ("1", "PNG"),
        ("RGBA", "WEBP"),
    ],
)
def test_odd_modes_become_rgb_of_the_same_size(mode: str, kind: str) -> None:
    stream = io.BytesIO()
    Image.new(mode, (13, 11)).save(stream, kind)
    image = decode_image(stream.getvalue(), max_pixels=PIXELS)
    assert (image.mode, image.size) == ("RGB", (13, 11))
    assert image_facts(stream.getvalue(), "0", SampleCaps()).size == (13, 11)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_cut_images_are_decode_errors(kind: str) -> None:
    data = image_bytes(40, 40, kind=kind)
    for cut in (0, 5, len(data) // 4, len(data) // 2):
        with pytest.raises(DataError) as caught:
            decode_image(data[:cut], max_pixels=PIXELS)
        assert caught.value.error_class == "decode"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_damaged_images_raise_nothing_but_data_errors(kind: str) -> None:
    data = image_bytes(24, 24, kind=kind, orientation=6)
    generator = random.Random(3)
    failed = 0
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(generator.randrange(1, 5)):
            damaged[generator.randrange(len(data))] = generator.randrange(256)
        for call in (
            lambda value: image_facts(value, "0", SampleCaps()),
            lambda value: decode_image(value, max_pixels=PIXELS),
        ):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Pillow's, about damaged EXIF
                    call(bytes(damaged))
            except DataError as error:
                assert error.error_class == "decode"
                failed += 1
    assert failed > 10, "no damage was noticed: the test shows nothing"
