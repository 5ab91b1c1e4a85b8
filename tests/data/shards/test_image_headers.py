"""Sizes come from headers, after orientation, without decoding a pixel."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
from PIL import Image, ImageFile, ImageOps
from support.shard_fakes import image_bytes

from vlmpack.data.shards.images import image_facts
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.errors import DataError

CAPS = SampleCaps(max_image_pixels=64_000_000)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_size_is_the_one_after_exif_orientation(
    kind: str, orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = image_bytes(30, 20, kind=kind, orientation=orientation)
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size
    assert shown == ((20, 30) if orientation >= 5 else (30, 20))

    def fail(image: object) -> None:
        raise AssertionError("a pixel was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    facts = image_facts(data, "0", CAPS)
    assert (facts.width, facts.height, facts.orientation) == (30, 20, orientation)
    assert facts.size == shown


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_the_size_of_the_newer_formats_is_that_of_their_pixels(
    kind: str, orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow turns a TIFF by itself, and may say its size as it is seen before it does; the other
    two have no orientation."""
    data = image_bytes(30, 20, kind=kind, orientation=orientation)
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size
    assert shown == ((20, 30) if (kind, orientation) == ("TIFF", 6) else (30, 20))
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    facts = image_facts(data, "0", CAPS)
    assert facts.size == shown and facts.format == kind


def test_orientation_behind_a_pngs_pixels_is_seen() -> None:
    plain = image_bytes(30, 20)
    exif = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    chunk = struct.pack(">I", len(exif)) + b"eXIf" + exif
    chunk += struct.pack(">I", zlib.crc32(b"eXIf" + exif))
    data = plain[:-12] + chunk + plain[-12:]
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size
    assert shown == (20, 30), "the test image carries no late orientation"
    assert image_facts(data, "0", CAPS).size == shown


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header claims many pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0")), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("size", [(9000, 9000), (12000, 10000), (60000, 60000)])
def test_pixel_cap_holds_from_the_header(size: tuple[int, int]) -> None:
    with pytest.raises(DataError, match="pixels") as caught:
        image_facts(bomb(*size), "0.png", CAPS)
    assert caught.value.error_class == "decode"
    assert "64000000" in str(caught.value)


def test_cap_is_not_hit_just_below() -> None:
    assert image_facts(bomb(8000, 8000), "0.png", CAPS).size == (8000, 8000)


@pytest.mark.parametrize(
    "data",
    [b"", b"<html>", b"\x89PNG\r\n\x1a\n", b"GIF89a" + b"\0" * 50, b"\xff\xd8\xff" + b"a" * 9],
)
def test_unreadable_headers_are_decode_errors(data: bytes) -> None:
    with pytest.raises(DataError, match=r"'0.jpg' has no readable") as caught:
        image_facts(data, "0.jpg", CAPS)
    assert caught.value.error_class == "decode"


def test_cmyk_and_16_bit_headers_are_read() -> None:
    for mode, kind in (("CMYK", "JPEG"), ("I;16", "PNG")):
        stream = io.BytesIO()
        Image.new(mode, (13, 11)).save(stream, kind)
        assert image_facts(stream.getvalue(), "0", CAPS).size == (13, 11)


def test_pillows_own_limit_holds_below_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match="decompression bomb") as caught:
        image_facts(image_bytes(30, 20), "0.png", CAPS)
    assert caught.value.error_class == "decode"
