"""Image files to upright RGB, and the files that are refused."""

from __future__ import annotations

import io
import random
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageFile
from support.images import file_of, one_image, picture

from vlmpack.data.shards.images import image_facts
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.encode import Encoder, decode_image
from vlmpack.encode.decode import IMAGE_FORMATS, suffix_of
from vlmpack.errors import DataError

CAP = 1_000_000
JPEG_ERROR = 6
"""Levels of 255 that JPEG at quality 95 may change in a smooth picture."""


def decoded(data: bytes) -> np.ndarray:
    image = decode_image(data, max_pixels=CAP)
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def refused(data: bytes, *, cap: int = CAP) -> str:
    with pytest.raises(DataError) as caught:
        decode_image(data, 2, max_pixels=cap)
    assert caught.value.error_class == "decode"
    assert "image 2" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG", "BMP", "TIFF"])
def test_the_pixels_of_each_format(kind):
    options = {"quality": 95} | ({"lossless": True} if kind == "WEBP" else {})
    original = np.asarray(picture()).astype(int)
    error = np.abs(decoded(file_of(picture(), kind, **options)) - original).max()
    assert error <= (JPEG_ERROR if kind == "JPEG" else 0)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    undo = {
        1: [],
        2: [Image.Transpose.FLIP_LEFT_RIGHT],
        3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.TRANSPOSE],
        6: [Image.Transpose.ROTATE_90],
        7: [Image.Transpose.TRANSVERSE],
        8: [Image.Transpose.ROTATE_270],
    }[orientation]
    stored = picture()
    for operation in undo:
        stored = stored.transpose(operation)
    found = decoded(file_of(stored, kind, exif=exif))
    assert (found == np.asarray(picture())).all()


def test_the_length_of_a_rotated_image_is_that_of_the_upright_one(encoder):
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = picture(160, 48).transpose(Image.Transpose.ROTATE_90)
    assert stored.size == (48, 160)
    sample = one_image(file_of(stored, "JPEG", exif=exif))
    encoded = encoder.encode(sample)
    assert encoded.length == encoder.length(sample, [(160, 48)]).num_tokens
    assert encoded.media.grid_thw == ((1, 4, 12),)


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "WEBP"])
def test_of_several_frames_or_pages_the_first_is_the_image(kind):
    first, second = picture(), picture().transpose(Image.Transpose.ROTATE_180)
    options = {"save_all": True} | ({"lossless": True} if kind == "WEBP" else {})
    data = file_of(first, kind, append_images=[second, first], **options)
    with Image.open(io.BytesIO(data)) as opened:
        assert opened.n_frames == 3
        expected = np.asarray(opened.convert("RGB")).astype(int)
        opened.seek(1)
        other = np.asarray(opened.convert("RGB")).astype(int)
    assert (decoded(data) == expected).all()
    assert (expected != other).any(), "the frames are the same"


def test_a_gif_with_transparent_pixels_is_laid_on_white():
    palette = picture().quantize(16)
    index = int(np.asarray(palette)[0, 0])
    data = file_of(palette, "GIF", transparency=index)
    shown = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))
    clear = shown[..., 3] == 0
    assert clear.any() and not clear.all()
    found = decoded(data)
    assert (found[clear] == 255).all() and (found[~clear] == shown[~clear][:, :3]).all()


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "CMYK", "LAB", "I;16"])
def test_pixels_of_a_tiff_in_other_colours(mode):
    grey = np.tile(np.linspace(0, 255, 48).astype(np.uint16), (32, 1))
    image = Image.fromarray(grey * 257) if mode == "I;16" else picture().convert(mode)
    data = file_of(image, "TIFF")
    wanted = grey[..., None].repeat(3, axis=2) if mode == "I;16" else image.convert("RGB")
    assert np.abs(decoded(data) - np.asarray(wanted).astype(int)).max() <= 1


@pytest.mark.parametrize(("mode", "kind"), [("F", "floats"), ("I", "integers")])
def test_a_tiff_without_a_scale_is_refused(mode, kind):
    data = file_of(Image.new(mode, (4, 4), 7), "TIFF")
    assert f"image 2 has pixels that are {kind} of 32 bits" in refused(data)
    with pytest.raises(DataError, match=r"image '0\.tif' has pixels that are .* of 32 bits"):
        image_facts(data, "0.tif", SampleCaps())


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF"])
def test_damaged_files_of_the_newer_formats_raise_nothing_else(kind):
    """Half of the bytes that are hit lie in the head, where a decoder believes what it reads."""
    draw, whole, refusals = random.Random(0), file_of(picture(), kind), 0
    for _ in range(300):
        data = bytearray(whole)
        for place in (draw.randrange(min(60, len(data))), draw.randrange(len(data))):
            data[place] = draw.randrange(256)
        try:
            decode_image(bytes(data), max_pixels=CAP)
        except DataError as error:
            assert error.error_class == "decode"
            refusals += 1
    assert 10 < refusals < 300


def test_every_format_has_an_ending_by_its_first_bytes():
    endings = [suffix_of(file_of(picture(), kind)) for kind in (*IMAGE_FORMATS, "MPO")]
    assert endings == ["jpg", "png", "webp", "gif", "bmp", "tif", "jpg"]


def test_a_cameras_jpeg_with_another_behind_it_is_its_first():
    several = file_of(picture(), "MPO", save_all=True, append_images=[Image.new("RGB", (9, 9))])
    with Image.open(io.BytesIO(several), formats=IMAGE_FORMATS) as opened:
        assert (opened.format, opened.n_frames) == ("MPO", 2)
    assert np.abs(decoded(several) - np.asarray(picture()).astype(int)).max() < 10 * JPEG_ERROR


def test_cmyk_becomes_rgb():
    found = decoded(file_of(picture().convert("CMYK"), "JPEG", quality=95))
    assert np.abs(found - np.asarray(picture()).astype(int)).max() <= 3 * JPEG_ERROR


def test_16_bit_grey_is_scaled_not_clipped():
    ramp = np.tile(np.linspace(0, 65535, 64).astype(np.uint16), (8, 1))
    found = decoded(file_of(Image.fromarray(ramp)))
    expected = (ramp // 256)[..., None].repeat(3, axis=2)
    assert np.abs(found - expected).max() <= 1
    assert len(np.unique(found)) > 60


@pytest.mark.parametrize("alpha", [0, 128, 255])
def test_transparent_pixels_are_laid_on_white(alpha):
    rgba = picture().convert("RGBA")
    rgba.putalpha(alpha)
    share = alpha / 255
    expected = np.asarray(picture()) * share + 255 * (1 - share)
    assert np.abs(decoded(file_of(rgba)) - expected).max() <= 1


def test_palettes_and_grey_keep_their_transparency():
    palette = picture().quantize(16)
    opaque = np.asarray(palette.convert("RGB")).astype(int)
    assert np.abs(decoded(file_of(palette)) - opaque).max() == 0
    index = int(np.asarray(palette)[0, 0])
    found = decoded(file_of(palette, transparency=index))
    assert (found[np.asarray(palette) == index] == 255).all()
    assert (found[np.asarray(palette) != index] == opaque[np.asarray(palette) != index]).all()
    grey = Image.merge("LA", (Image.new("L", (4, 4), 0), Image.new("L", (4, 4), 0)))
    assert (decoded(file_of(grey)) == 255).all()


def test_one_bit_and_grey_images():
    assert set(np.unique(decoded(file_of(picture().convert("1"))))) <= {0, 255}
    assert decoded(file_of(picture().convert("L"))).shape == (32, 48, 3)


@pytest.mark.parametrize("kind", [*IMAGE_FORMATS])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_truncated_file_is_refused(kind, share):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    data = file_of(noise, kind)
    assert "cannot be decoded" in refused(data[: int(len(data) * share)])


@pytest.mark.parametrize(
    "data",
    [b"", b"hello, I am no image", b"\xff\xd8\xff" + bytes(50), b"\x89PNG\r\n\x1a\n" + bytes(20)],
    ids=["empty", "text", "JPEG head", "PNG head"],
)
def test_what_is_no_image_is_refused(data):
    assert "cannot be decoded" in refused(data)


@pytest.mark.parametrize("kind", ["PPM", "ICO", "TGA"])
def test_other_formats_are_refused(kind):
    assert "cannot be decoded" in refused(file_of(picture(), kind))


@pytest.mark.parametrize("kind", [*IMAGE_FORMATS])
def test_the_pixel_cap_is_applied_before_any_pixel_is_decoded(monkeypatch, kind):
    data = file_of(picture(100, 80), kind)
    loads = []
    original = ImageFile.ImageFile.load

    def counted(self):
        loads.append(self.size)
        return original(self)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counted)
    assert "100 x 80 pixels, more than data.max_image_pixels = 7999" in refused(data, cap=7999)
    assert loads == []
    decode_image(data, max_pixels=8000)
    assert loads, "the decoder was not the one that is counted"


def test_a_decompression_bomb_is_refused_in_silence(tmp_path):
    """Pillow warns from 89 million pixels on; the cap says it first, and only once."""
    bomb = file_of(Image.new("1", (10_000, 10_000)))
    assert len(bomb) < 50_000
    assert "more than data.max_image_pixels" in refused(bomb)


def test_the_encoder_names_the_image_and_passes_its_cap_on(tiny_folder):
    encoder = Encoder(tiny_folder).replace(max_image_pixels=100)
    with pytest.raises(DataError, match="image 0 has 48 x 32 pixels"):
        encoder.encode(one_image(file_of(picture())))


def test_the_encoder_says_which_member_an_image_is(tiny_folder):
    """A place among the images of a sample left its member to be counted out."""
    sample = replace(one_image(file_of(picture())), image_names=("0.jpg",))
    with pytest.raises(DataError, match=r"image 0 \('0.jpg'\) has 48 x 32 pixels"):
        Encoder(tiny_folder).replace(max_image_pixels=100).encode(sample)
    flat = replace(sample, images=(file_of(picture().resize((4000, 8))),))
    encoder = Encoder(tiny_folder)
    for call in (lambda: encoder.length(flat, [(4000, 8)]), lambda: encoder.encode(flat)):
        with pytest.raises(DataError, match=r"image 0 \('0.jpg'\): an image of 4000 x 8 pixels"):
            call()
