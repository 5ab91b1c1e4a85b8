"""Damaged shards through the whole data layer: found or harmless, and never half a sample."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from support.shard_fakes import key_of, micro_batches, open_data, sample_fields, write_shard

from vlmpack.data.loading.loader import BinRequest, MicroBatch
from vlmpack.data.pipeline import TrainData
from vlmpack.errors import DataError, EmptyDataError
from vlmpack.recipe.data import OnErrorSection

COUNT = 6
SKIP_ALL = OnErrorSection(integrity="skip", decode="skip", schema="skip")


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    samples = ((key_of(n), sample_fields(n)) for n in range(COUNT))
    return write_shard(tmp_path / "s.tar", samples)


def opened(shard: Path, index: Path) -> TrainData:
    return open_data(
        str(shard), index, micro_batch_size=1, global_batch_size=3, on_error=SKIP_ALL, num_probed=0
    )


def outcome(data: TrainData, number: int) -> MicroBatch:
    found = data.dataset[BinRequest((data.fitted.table.ref(number),))]
    assert isinstance(found, MicroBatch)
    return found


def same(one: MicroBatch, two: MicroBatch) -> bool:
    """Whether a sample became the same ids, labels and pixels."""
    a, b = one.batch, two.batch
    if (a.media is None) != (b.media is None):
        return False
    pixels = a.media is None or torch.equal(a.media.pixel_values, b.media.pixel_values)  # type: ignore[union-attr]
    return pixels and torch.equal(a.input_ids, b.input_ids) and torch.equal(a.labels, b.labels)


def overwrite(path: Path, data: bytes) -> None:
    """Other bytes under the same time stamp: bit rot."""
    status = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def changed_byte(data: bytes, place: int, draw: random.Random) -> bytes:
    damaged = bytearray(data)
    damaged[place] ^= draw.randrange(1, 256)
    return bytes(damaged)


def test_a_cut_at_every_block_stops_before_training(shard: Path, tmp_path: Path) -> None:
    whole = shard.read_bytes()
    table = opened(shard, tmp_path / "whole").fitted.table
    end = int((table.offsets + table.lengths).max()) + 1024  # then only padding is lost
    stopped = 0
    for cut in range(0, len(whole), 512):
        shard.write_bytes(whole[:cut])
        if cut >= end:
            assert len(micro_batches(opened(shard, tmp_path / f"{cut}"), 2)) == COUNT
            continue
        with pytest.raises(DataError) as caught:
            opened(shard, tmp_path / f"{cut}")
        assert (caught.value.error_class, caught.value.shard) == ("integrity", str(shard))
        stopped += 1
    assert stopped == end // 512


def test_a_cut_after_indexing_loses_the_samples_behind_it_only(shard: Path, tmp_path: Path) -> None:
    whole = shard.read_bytes()
    data = opened(shard, tmp_path / "i")
    table = data.fitted.table
    truth = [outcome(data, number) for number in range(COUNT)]
    ends = (table.offsets + table.lengths).tolist()
    for cut in range(0, len(whole), 512):
        overwrite(shard, whole[:cut])
        for number in range(COUNT):
            found = outcome(data, number)
            if ends[number] <= cut:
                assert same(found, truth[number])
            else:
                assert found.samples == () and found.batch.num_label_tokens == 0
                assert [hole.error_class for hole in found.skipped] == ["integrity"]


@pytest.mark.slow
def test_every_changed_byte_after_indexing_is_found_or_harmless(
    shard: Path, tmp_path: Path
) -> None:
    """400 bytes: a hole where the byte lies in a sample's span, and nothing anywhere else."""
    whole = shard.read_bytes()
    data = opened(shard, tmp_path / "i")
    table = data.fitted.table
    truth = [outcome(data, number) for number in range(COUNT)]
    assert all(micro.samples for micro in truth)
    draw = random.Random(11)
    holes = 0
    for _ in range(400):
        place = draw.randrange(len(whole))
        overwrite(shard, changed_byte(whole, place, draw))
        for number in range(COUNT):
            start = int(table.offsets[number])
            found = outcome(data, number)
            if start <= place < start + int(table.lengths[number]):
                holes += 1
                assert found.samples == () and found.batch.num_label_tokens == 0
                assert "checksum" in found.skipped[0].reason
            else:
                assert same(found, truth[number]), place
    assert 200 < holes < 400, "both cases must have been met"


def check_bytes_changed_before_indexing(shard: Path, tmp_path: Path, count: int) -> None:
    """No tar has checksums of its content: a letter of a text that changed is the text.

    So each sample is the same, or a hole, or whole with other content (the byte lay in its JSON);
    and a damaged structure stops the run.
    """
    whole = shard.read_bytes()
    before = opened(shard, tmp_path / "whole")
    truth = {key_of(number): outcome(before, number) for number in range(COUNT)}
    draw = random.Random(12)
    met = {"stopped": 0, "hole": 0, "same": 0, "text": 0}
    for turn in range(count):
        place = draw.randrange(len(whole))
        shard.write_bytes(changed_byte(whole, place, draw))
        try:
            data = opened(shard, tmp_path / f"{turn}")
        except (DataError, EmptyDataError) as error:
            assert isinstance(error, DataError) and error.shard == str(shard)
            met["stopped"] += 1
            continue
        table = data.fitted.table
        assert table.num_samples == COUNT, "a sample vanished without a word"
        for number in range(COUNT):
            start, found = int(table.offsets[number]), outcome(data, number)
            if not start <= place < start + int(table.lengths[number]):
                assert same(found, truth[key_of(number)])
                continue
            if found.skipped:
                met["hole"] += 1
            elif same(found, truth[found.samples[0].key]):
                met["same"] += 1
            else:
                met["text"] += 1
                expected = truth[found.samples[0].key]
                assert found.num_images == expected.num_images
                if found.batch.media is not None and expected.batch.media is not None:
                    pixels = found.batch.media.pixel_values
                    assert torch.equal(pixels, expected.batch.media.pixel_values)
    assert met["stopped"] and met["hole"], met
    assert met["text"] < 0.1 * count, met


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.soak)])
def test_a_changed_byte_before_indexing_never_makes_half_a_sample(
    shard: Path, tmp_path: Path, count: int
) -> None:
    check_bytes_changed_before_indexing(shard, tmp_path, count)
