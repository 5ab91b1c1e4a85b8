"""A sample encoded by several processes, each with the pixels of its own images."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.families import tiny_family_folder
from support.shard_fakes import image_bytes
from support.shards import TINY_MODEL, mixed_samples

from vlmpack.encode import Encoder, decode_image
from vlmpack.encode import images as images_module
from vlmpack.encode.decode import size_of
from vlmpack.errors import DataError
from vlmpack.packing import EncodedSample, deal_media, pack_batch_sequences
from vlmpack.packing.digest import digest_of
from vlmpack.packing.image_owners import RowOwners, SampleOwners

PIXELS = 1 << 20


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(TINY_MODEL)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files whose pixels were decoded."""
    seen: list[bytes] = []

    def noted(data: bytes, *args: object, **settings: int) -> Image.Image:
        seen.append(data)
        return decode_image(data, *args, **settings)

    monkeypatch.setattr(images_module, "decode_image", noted)
    return seen


def encoded_by(encoder: Encoder, rank: int | None, size: int, *, sizes=None) -> list[EncodedSample]:
    """The mixed samples as a process encodes them, of one row."""
    samples = [sample.cooked() for sample in mixed_samples()]
    patches = [
        encoder.length(sample.cooked(), sample.sizes).num_patches for sample in mixed_samples()
    ]
    found = []
    for place, sample in enumerate(samples):
        share = SampleOwners(RowOwners(rank, size), sum(patches[:place]), sum(patches))
        found.append(encoder.encode(sample, None if sizes is None else sizes[place], share))
    return found


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava_onevision"])
def test_the_shares_together_are_the_row_of_one_process(
    name: str, tmp_path: Path, decoded, size: int
) -> None:
    """The second family shows an image in more detail that is its sample's only one."""
    encoder = Encoder(tiny_family_folder(name, tmp_path))
    whole = [encoder.encode(sample.cooked()) for sample in mixed_samples()]
    row = pack_batch_sequences(whole, pad_token_id=0)
    files = [data for sample in mixed_samples() for data in sample.images]
    digests, all_pixels, owned = set(), [], []
    for rank in (*range(size), None):
        decoded.clear()
        mine = pack_batch_sequences(encoded_by(encoder, rank, size), pad_token_id=0)
        digests.add(digest_of(mine))
        assert torch.equal(mine.input_ids, row.input_ids) and torch.equal(mine.labels, row.labels)
        assert torch.equal(mine.position_ids, row.position_ids)
        assert (mine.media.grid_thw, mine.media.num_tokens) == (
            row.media.grid_thw,
            row.media.num_tokens,
        )
        own = [n for n, is_mine in enumerate(mine.media.owners.mine) if is_mine]
        assert decoded == [files[n] for n in own], "the pixels of no other image are looked at"
        owned += own
        all_pixels.append(mine.media.pixel_values)
        if rank is not None:
            deal_media(mine, rank=rank, size=size)
    assert sorted(owned) == list(range(len(files)))
    assert len(digests) == 1, "all but the pixels is the same everywhere"
    counts = [t * h * w for t, h, w in row.media.grid_thw]
    theirs = [part for pixels in all_pixels for part in pixels.split(1)]
    ours = [row.media.pixel_values.split(counts)[n] for n in owned]
    assert torch.equal(torch.cat(theirs), torch.cat(ours)), "bit for bit"
    assert all_pixels[-1].shape[0] == 0, "a later stage makes none"


def test_images_are_shrunk_as_alone(encoder) -> None:
    sizes = [tuple((w // 2, h // 2) for w, h in sample.sizes) for sample in mixed_samples()]
    alone = [
        encoder.encode(sample.cooked(), shrunk)
        for sample, shrunk in zip(mixed_samples(), sizes, strict=True)
    ]
    parts = [encoded_by(encoder, rank, 2, sizes=sizes) for rank in range(2)]
    for place, one in enumerate(alone):
        if one.media is None:
            continue
        assert parts[0][place].media.grid_thw == one.media.grid_thw
        pixels = [part[place].media.pixel_values for part in parts]
        assert sum(map(len, pixels)) == len(one.media.pixel_values)


def photo(seed: int) -> bytes:
    """As large as the tiny model's images."""
    return image_bytes(56, 56, seed=seed, kind="JPEG")


def cut(data: bytes) -> bytes:
    """The file without its end: whole header, half of the pixels."""
    return data[: len(data) * 3 // 4]


def without_addresses(text: str) -> str:
    """Pillow says where in memory a file is."""
    return re.sub(r"0x[0-9a-f]+", "", text)


def error_of(encoder: Encoder, images: tuple[bytes, ...], rank: int | None, size: int) -> DataError:
    sample = replace(mixed_samples()[3].cooked(), images=images)
    share = None if size == 0 else SampleOwners(RowOwners(rank, size), 0, 1)
    with pytest.raises(DataError) as raised:
        encoder.encode(sample, None, share)
    return raised.value


def test_a_damaged_image_is_met_by_its_owner_alone(encoder) -> None:
    """Three images, the last two of which are cut: one process names image 1, and so do these."""
    first, second, third = map(photo, range(3))
    total = 3 * encoder.image_rule.layout(56, 56).grid[1] ** 2
    sample = replace(mixed_samples()[3].cooked(), images=(first, cut(second), cut(third)))
    with pytest.raises(DataError, match=r"image 1 .*cannot be decoded") as alone:
        encoder.encode(sample)
    met = {}
    for rank in (0, 1, 2, None):
        share = SampleOwners(RowOwners(rank, 3), 0, total)
        try:
            encoder.encode(sample, None, share)
        except DataError as error:
            met[rank] = error
    assert None not in met and len(met) < 3
    reasons = {error.image: error.reason for error in met.values()}
    assert reasons[min(reasons)] == alone.value.reason and min(reasons) == 1


def test_a_header_that_nobody_can_read_is_met_by_all(encoder) -> None:
    first, second, third = mixed_samples()[3].images
    alone = error_of(encoder, (first, second[:3], third), None, 0)
    for rank in (0, 1, None):
        found = error_of(encoder, (first, second[:3], third), rank, 2)
        assert without_addresses(found.reason) == without_addresses(alone.reason)
        assert (found.error_class, found.image) == ("decode", 1)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_the_header_says_what_decoding_finds(kind: str, orientation: int) -> None:
    data = image_bytes(30, 20, kind=kind, orientation=orientation)
    expected = decode_image(data, max_pixels=PIXELS).size
    assert (
        size_of(data, max_pixels=PIXELS) == expected == ((20, 30) if orientation == 6 else (30, 20))
    )


def test_a_header_is_refused_as_the_image_is() -> None:
    data = image_bytes(30, 20)
    for broken, most in ((data, 599), (b"", PIXELS), (data[:20], PIXELS), (b"GIF89a", PIXELS)):
        with pytest.raises(DataError) as of_header:
            size_of(broken, "0", max_pixels=most)
        with pytest.raises(DataError) as of_image:
            decode_image(broken, "0", max_pixels=most)
        reasons = [without_addresses(raised.value.reason) for raised in (of_header, of_image)]
        assert reasons[0] == reasons[1]


def test_a_header_that_lies_is_no_image(encoder, monkeypatch) -> None:
    monkeypatch.setattr(images_module, "size_of", lambda *args, **settings: (560, 560))
    stream = io.BytesIO()
    Image.new("RGB", (56, 56)).save(stream, "PNG")
    with pytest.raises(DataError, match="56 x 56 pixels, its header says 560 x 560") as raised:
        encoder.pixels([stream.getvalue()], None, SampleOwners(RowOwners(0, 1), 0, 16))
    assert raised.value.error_class == "integrity"
