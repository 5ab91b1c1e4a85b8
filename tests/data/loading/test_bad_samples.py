"""A bad sample is a hole: listed, counted, bounded, and nothing else moves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.shard_fakes import (
    FakeEncoder,
    assert_same_tensors,
    chat_json,
    image_bytes,
    key_of,
    loading,
    micro_batches,
    open_data,
    sample_fields,
    write_shard,
    write_shards,
)

from vlmpack.data.loading.ledger import Ledger, SkipLimiter, SkipLimits
from vlmpack.data.pipeline import TrainData
from vlmpack.errors import DataError, DataLimitError
from vlmpack.recipe.data import OnErrorSection

COUNT = 37
SKIP_ALL = OnErrorSection(transport="raise", integrity="skip", decode="skip", schema="skip")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_shards(folder, COUNT, per_shard=10)
    return folder


def poison(path: Path, key: str) -> None:
    """Flips a byte in a sample's JSON, keeping size and time stamp: bit rot after indexing."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    place = content.index(f"q{int(key)} ".encode())
    content[place + 1] ^= 0x01
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_three_bad_samples_leave_every_other_unchanged(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, COUNT, per_shard=10)
    good = micro_batches(open_data(pattern, tmp_path / "i", micro_batch_size=1))
    bad_keys = {key_of(3), key_of(14), key_of(25)}
    for key in bad_keys:
        poison(tmp_path / f"s-000{int(key) // 10}.tar", key)
    ledger = Ledger(tmp_path / "data-errors.jsonl")
    data = open_data(pattern, tmp_path / "i", micro_batch_size=1, ledger=ledger, num_probed=0)
    bad = micro_batches(data)
    assert len(bad) == len(good)
    holes = 0
    for left, right in zip(good, bad, strict=True):
        if left.samples[0].key in bad_keys:
            holes += 1
            assert right.samples == ()
            assert right.batch.num_label_tokens == 0
            assert [hole.key for hole in right.skipped] == [left.samples[0].key]
        else:
            assert_same_tensors(left, right)
    assert holes >= 3
    lines = [json.loads(line) for line in (tmp_path / "data-errors.jsonl").read_text().splitlines()]
    assert {line["key"] for line in lines} == bad_keys
    assert {line["class"] for line in lines} == {"integrity"}
    assert all(
        "checksum" in line["reason"]
        and line["shard"]
        and line["offset"] >= 0
        and line["epoch"] == 0
        for line in lines[:3]
    )


def test_a_hole_in_a_row_keeps_its_neighbours(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, COUNT, per_shard=10)
    good = micro_batches(open_data(pattern, tmp_path / "i"))
    poison(tmp_path / "s-0000.tar", key_of(3))
    bad = micro_batches(open_data(pattern, tmp_path / "i", num_probed=0))
    for left, right in zip(good, bad, strict=True):
        kept = [sample for sample in left.samples if sample.key != key_of(3)]
        assert list(right.samples) == kept
        assert list(right.batch.keys) == [sample.key for sample in kept]


def bad_image_shard(folder: Path, is_bad: Any, count: int) -> str:
    """Samples with one image each; bad ones have a PNG whose pixels are cut off."""

    def fields(number: int) -> dict[str, bytes]:
        image = image_bytes(40, 40, seed=number)
        return {
            "json": chat_json(f"q{number}", "a", 1),
            "0.png": image[: len(image) // 2] if is_bad(number) else image,
        }

    return str(write_shard(folder / "s.tar", ((key_of(n), fields(n)) for n in range(count))))


def test_decode_errors_are_met_while_training(tmp_path: Path) -> None:
    pattern = bad_image_shard(tmp_path, lambda number: number == 5, 16)
    data = open_data(pattern, tmp_path / "i", num_probed=0)
    holes = [hole for micro in micro_batches(data, 2) for hole in micro.skipped]
    assert [(hole.key, hole.error_class) for hole in holes] == [(key_of(5), "decode")]
    strict = open_data(
        pattern, tmp_path / "i", num_probed=0, on_error=OnErrorSection(decode="raise")
    )
    with pytest.raises(DataError, match="cannot decode") as caught:
        micro_batches(strict, 2)
    assert (caught.value.error_class, caught.value.key) == ("decode", key_of(5))
    assert caught.value.shard == pattern and caught.value.offset is not None


@pytest.mark.slow
def test_errors_keep_their_place_out_of_a_worker(tmp_path: Path) -> None:
    pattern = bad_image_shard(tmp_path, lambda number: number == 5, 16)
    strict = open_data(
        pattern,
        tmp_path / "i",
        num_probed=0,
        on_error=OnErrorSection(decode="raise"),
        **loading(1, timeout_seconds=120),
    )
    with pytest.raises(DataError) as caught:
        micro_batches(strict, 2)
    assert (caught.value.error_class, caught.value.key) == ("decode", key_of(5))


def test_a_bug_is_not_swallowed(folder: Path) -> None:
    encoder = FakeEncoder(crash=frozenset({"q3 "}))
    data = open_data(
        str(folder / "s-*.tar"), folder / "i", encoder=encoder, on_error=SKIP_ALL, num_probed=0
    )
    with pytest.raises(ZeroDivisionError, match="a bug"):
        micro_batches(data, 5)


@pytest.mark.cases(slow="encoder1*")
@pytest.mark.parametrize(
    ("encoder", "seconds", "reason"),
    [
        (FakeEncoder(hang=frozenset({"q3 "})), 5, "no batch came from 1 workers within 5 s"),
        (FakeEncoder(die=frozenset({"q3 "})), 45, "a loader process ended"),
    ],
)
@pytest.mark.slow
def test_a_late_or_dead_worker_ends_the_run_readably(
    folder: Path, encoder: FakeEncoder, seconds: int, reason: str
) -> None:
    settings = loading(1, timeout_seconds=seconds)
    data = open_data(
        str(folder / "s-*.tar"), folder / "i", encoder=encoder, num_probed=0, **settings
    )
    with pytest.raises(DataError, match=reason) as caught:
        micro_batches(data, 5)
    assert caught.value.error_class == "transport"


def limited(data: TrainData, limits: SkipLimits, steps: int) -> int:
    """Trains until the limit; returns the samples planned before it."""
    limiter, planned = SkipLimiter(limits, data.ledger), 0
    for step in data.batches(data.start(), rank=0, dp=1, max_steps=steps):
        planned += step.num_samples
        limiter.check(samples=step.num_samples, skipped=len(step.skipped))
    return planned


def test_half_of_the_samples_bad_stops_the_run_and_names_the_worst(tmp_path: Path) -> None:
    pattern = bad_image_shard(tmp_path, lambda number: number % 2 == 0, 64)
    ledger = Ledger(tmp_path / "data-errors.jsonl")
    data = open_data(pattern, tmp_path / "i", num_probed=0, ledger=ledger)
    with pytest.raises(DataLimitError) as caught:
        limited(data, SkipLimits(), 8)
    message = str(caught.value)
    assert "at most 10 may be" in message
    assert pattern in message and str(tmp_path / "data-errors.jsonl") in message
    assert message.count(" times ") == 10, "the ten worst samples"
    assert 11 <= len(ledger.lines()) < 32, "it stopped, and not at once"


def test_the_message_names_the_ten_worst_files_of_fourteen(tmp_path: Path) -> None:
    """Every second sample of each shard is bad, and the shards are of different sizes."""
    for shard in range(14):
        bad_image_shard(tmp_path / f"{shard:02d}", lambda number: number % 2 == 0, 2 * (shard + 1))
    ledger = Ledger(tmp_path / "data-errors.jsonl")
    data = open_data(
        str(tmp_path / "*/s.tar"),
        tmp_path / "i",
        num_probed=0,
        ledger=ledger,
        micro_batch_size=6,
        global_batch_size=210,
    )
    with pytest.raises(DataLimitError, match="105 of the last 210 samples were skipped") as caught:
        limited(data, SkipLimits(), 2)
    listed = str(caught.value).split("Worst files:\n")[1].split("\nWorst samples:")[0]
    places = [tmp_path / f"{shard:02d}" / "s.tar" for shard in range(13, 3, -1)]
    expected = [
        f"  {count} in {path}" for count, path in zip(range(14, 4, -1), places, strict=True)
    ]
    assert listed.splitlines() == expected


def test_ten_bad_samples_do_not_stop_the_run(tmp_path: Path) -> None:
    pattern = bad_image_shard(tmp_path, lambda number: number % 6 == 0 and number < 60, 64)
    ledger = Ledger(tmp_path / "data-errors.jsonl")
    data = open_data(pattern, tmp_path / "i", num_probed=0, ledger=ledger)
    assert limited(data, SkipLimits(), 8) == 64
    assert len(data.ledger.lines()) == 10


def test_bad_samples_that_the_index_knows_stop_before_training(tmp_path: Path) -> None:
    samples = [("good", sample_fields(1)), ("bad", {"json": b"{"}), ("bad2", {"json": b"{"})]
    write_shard(tmp_path / "s.tar", samples)
    with pytest.raises(DataError, match=r"1 more samples.*data\.on_error\.schema: skip") as caught:
        open_data(str(tmp_path / "s.tar"), tmp_path / "i")
    assert caught.value.key == "bad"
    data = open_data(str(tmp_path / "s.tar"), tmp_path / "i", on_error=SKIP_ALL)
    assert data.summary().num_bad == {"schema": 2}
    assert (data.summary().num_usable, data.plan.epoch_size) == (1, 3)
    (step,) = data.batches(data.start(), rank=0, dp=1, max_steps=1)
    assert sorted(hole.key for hole in step.skipped) == ["bad", "bad2"]


def test_a_missing_shard_is_a_transport_error(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, 20, per_shard=10)
    data = open_data(pattern, tmp_path / "i", num_probed=0)
    data.dataset.reader.fetcher.close()  # type: ignore[attr-defined]  # an open file would stay
    (tmp_path / "s-0001.tar").unlink()
    with pytest.raises(DataError, match="No such file") as caught:
        micro_batches(data, 3)
    assert caught.value.error_class == "transport"


def test_pillow_reads_the_half_image_header_only(tmp_path: Path) -> None:
    """Guard: the cut PNG of these tests passes the index and fails only when decoded."""
    image = image_bytes(40, 40)
    (tmp_path / "half.png").write_bytes(image[: len(image) // 2])
    with Image.open(tmp_path / "half.png") as opened:
        assert opened.size == (40, 40)
        with pytest.raises(OSError, match="truncated"):
            opened.load()
