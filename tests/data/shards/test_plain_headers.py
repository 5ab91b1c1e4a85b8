"""What is read of plain headers without Pillow is what Pillow reads, whatever the bytes."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from vlmpack.data.shards import images
from vlmpack.data.shards.caps import SampleCaps
from vlmpack.data.shards.image_headers import plain_header
from vlmpack.data.shards.images import ImageFacts, image_facts
from vlmpack.errors import DataError

CAPS = SampleCaps(max_image_pixels=64_000_000)
Outcome = ImageFacts | tuple[str, str]


def saved(kind: str, mode: str = "RGB", size: tuple[int, int] = (37, 21), **options) -> bytes:
    pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    stream = io.BytesIO()
    (Image.new(mode, size) if mode == "I;16" else image.convert(mode)).save(stream, kind, **options)
    return stream.getvalue()


def exif_of(orientation: int, thumbnail: bytes = b"") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes() + thumbnail


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def jpegs() -> Iterator[bytes]:
    plain = saved("JPEG")
    yield from (plain, saved("JPEG", "L"), saved("JPEG", "CMYK"), saved("JPEG", size=(1, 1)))
    yield saved("JPEG", progressive=True, quality=30)
    yield saved("JPEG", optimize=True, subsampling=0, dpi=(72, 72), comment=b"a comment")
    yield saved("JPEG", icc_profile=b"i" * 500)
    yield saved("JPEG", icc_profile=b"i" * 140_000)
    yield saved("JPEG", exif=exif_of(6))
    yield saved("JPEG", exif=exif_of(3, thumbnail=saved("JPEG", size=(90, 60))))
    yield saved("JPEG", xmp=b'<x tiff:Orientation="8"/>')
    yield saved("JPEG", restart_marker_rows=1)
    stream = io.BytesIO()
    pair = [Image.new("RGB", (37, 21)), Image.new("RGB", (10, 50))]
    pair[0].save(stream, "MPO", save_all=True, append_images=pair[1:])
    yield stream.getvalue()
    head, rest = plain[:2], plain[2:]
    yield head + segment(0xE2, b"ICC_PROFILE\0\1") + rest
    yield head + segment(0xEE, b"Adobe") + rest
    yield head + segment(0xED, b"Photoshop 3.0\0008BIM\4\4") + rest
    yield head + segment(0xDB, b"\0" * 64) + rest
    yield head + segment(0xC0, b"\x08\0\x05\0\x06\1\1\x11\0") + rest
    yield head + segment(0xC2, b"\x08\x0b\xb8\x0f\xa0\3" + b"\1\x11\0" * 3) + rest
    yield head + segment(0xC1, b"\x0c\0\x05\0\x06\1\1\x11\0") + rest
    yield head + b"\xff\xff\xff" + rest
    yield head + b"junk" + rest
    yield head + b"\xff\xd0" + rest
    yield head + segment(0xDA, b"\1\1\0\0\x3f\0") + rest
    frame, scan = plain.index(b"\xff\xc0"), plain.index(b"\xff\xda")
    longer = segment(0xC0, plain[frame + 4 : frame + 19] + b"\1")
    yield plain[:frame] + longer + plain[frame + 19 :]
    yield from (plain[:end] for end in range(scan, scan + 16))


def pngs() -> Iterator[bytes]:
    for mode in ("1", "L", "LA", "RGB", "RGBA", "P", "I;16"):
        yield saved("PNG", mode)
    yield saved("PNG", dpi=(90, 90))
    yield saved("PNG", transparency=(1, 2, 3))
    yield saved("PNG", exif=exif_of(6))
    text = PngImagePlugin.PngInfo()
    text.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="5"/>')
    yield saved("PNG", pnginfo=text)
    stream = io.BytesIO()
    Image.new("RGB", (9, 8)).save(
        stream, "PNG", save_all=True, append_images=[Image.new("RGB", (9, 8), "red")]
    )
    yield stream.getvalue()
    plain = saved("PNG")
    first, rest = plain[:33], plain[33:]
    yield first + chunk(b"gAMA", b"\0\0\xb1\x8f") + chunk(b"sRGB", b"\0") + rest
    yield first + chunk(b"gAMA", b"\0\0\xb1\x8f")[:-1] + b"x" + rest
    yield first + chunk(b"eXIf", exif_of(8)[6:]) + rest
    yield plain[:-12] + chunk(b"eXIf", exif_of(8)[6:]) + plain[-12:]
    for header in (
        b"\x08\2\0\0\1",
        b"\x08\2\0\1\0",
        b"\x10\2\0\0\0",
        b"\x03\2\0\0\0",
        b"\x08\2\7\0\0",
    ):
        yield plain[:8] + chunk(b"IHDR", plain[16:24] + header) + rest
    for size in ((0, 5), (90_000, 90_000), (8_001, 8_000), (60_000, 1)):
        yield plain[:8] + chunk(b"IHDR", struct.pack(">II", *size) + plain[24:29]) + rest


def damaged(data: bytes, draw: random.Random, count: int) -> Iterator[bytes]:
    """The file itself, cut at places of its header, and with single bytes changed there."""
    yield data
    end = max(1, min(len(data), 760))
    for _ in range(count):
        yield data[: draw.randrange(end)]
        place = draw.randrange(end)
        yield data[:place] + bytes([draw.randrange(256)]) + data[place + 1 :]
        yield data[:place] + draw.choice([b"\xff", b"\0", b""]) + data[place + 1 :]


def outcome(data: bytes) -> Outcome:
    try:
        return image_facts(data, "0.jpg", CAPS)
    except DataError as error:
        return error.error_class, error.reason


def compare(count: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Each file by both ways; what was seen of each kind."""
    draw, seen = random.Random(5), Counter[str]()
    whole = [*jpegs(), *pngs(), saved("WEBP"), saved("WEBP", exif=exif_of(6)), b"", b"\xff\xd8"]
    files = [file for data in whole for file in damaged(data, draw, count)]
    found = [outcome(data) for data in files]
    plain = [plain_header(data) is not None for data in files]
    with monkeypatch.context() as patched:
        patched.setattr(images, "plain_header", lambda data: None)
        for data, fast, facts in zip(files, plain, found, strict=True):
            assert facts == outcome(data), data[:200]
            seen["plain" if fast else "Pillow"] += 1
            seen["refused" if isinstance(facts, tuple) else facts.format] += 1
            seen["plain but refused"] += fast and isinstance(facts, tuple)
            seen["turned"] += isinstance(facts, ImageFacts) and facts.orientation > 1
    return seen


def test_plain_headers_are_what_pillow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = compare(12, monkeypatch)
    assert seen["plain"] > 300 and seen["Pillow"] > 300, seen
    assert min(seen["refused"], seen["JPEG"], seen["PNG"]) > 200, seen
    assert seen["plain but refused"] > 5, f"no image above the cap: {seen}"
    assert seen["turned"] > 30, seen


@pytest.mark.soak
def test_plain_headers_are_what_pillow_reads_of_many_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = compare(1500, monkeypatch)
    assert seen["plain"] > 30_000 and seen["refused"] > 30_000, seen


def test_usual_files_are_read_without_pillow() -> None:
    """Else the short way would be one that nothing goes."""
    usual = [saved("JPEG", "L"), saved("JPEG"), saved("JPEG", progressive=True)]
    usual += [saved("JPEG", icc_profile=b"i" * 500), saved("PNG"), saved("PNG", "RGBA")]
    assert [plain_header(data) for data in usual[:4]] == [(37, 21, "JPEG")] * 4
    assert [plain_header(data) for data in usual[4:]] == [(37, 21, "PNG")] * 2


def test_pillows_own_limit_is_still_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    kind, reason = outcome(saved("PNG"))
    assert kind == "decode" and "decompression bomb" in reason
