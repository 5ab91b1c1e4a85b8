"""How many samples a run may lose, and what it writes down."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from vlmpack.data.forkserver import worker_context
from vlmpack.data.loading.ledger import Ledger, SkipLimiter, SkipLimits
from vlmpack.data.loading.read import SkippedSample
from vlmpack.errors import DataError, DataLimitError, RunDirError
from vlmpack.recipe.data import OnErrorSection


def limiter(**changes: float) -> SkipLimiter:
    return SkipLimiter(SkipLimits(**changes), Ledger(None))  # type: ignore[arg-type]


def hole(number: int, shard: str = "s") -> SkippedSample:
    return SkippedSample(number, f"k{number}", shard, number, "decode", "a reason")


def test_ten_in_a_window_pass_and_eleven_stop() -> None:
    counts = limiter()
    for _ in range(10):
        counts.check(samples=100, skipped=1)
    with pytest.raises(DataLimitError, match="11 of the last 1100 samples"):
        counts.check(samples=100, skipped=1)


def test_old_steps_leave_the_window() -> None:
    counts = limiter()
    for _ in range(50):
        counts.check(samples=1000, skipped=1)  # ten in any window of 10,000


def test_share_above_the_floor() -> None:
    counts = limiter(max_fraction=0.01)
    for _ in range(9):
        counts.check(samples=1000, skipped=11)
    with pytest.raises(DataLimitError, match="110 of the last 10000"):
        for _ in range(2):
            counts.check(samples=1000, skipped=11)


def test_consecutive_batches() -> None:
    counts = limiter(max_fraction=1.0)
    for _ in range(12):
        counts.check(samples=8, skipped=8)
    counts.check(samples=8, skipped=7)  # one sample was trained: the row is broken
    for _ in range(12):
        counts.check(samples=8, skipped=8)
    with pytest.raises(DataLimitError, match="104 samples in a row"):
        counts.check(samples=8, skipped=8)


def test_worst_files_come_from_all_ranks_lines(tmp_path: Path) -> None:
    path = tmp_path / "data-errors.jsonl"
    Ledger(path).record([hole(n, "other-rank.tar") for n in range(5)], epoch=0, batch=1)
    mine = Ledger(path)
    mine.record([hole(1, "mine.tar")], epoch=0, batch=1)
    worst = mine.worst()
    assert worst.files == (("other-rank.tar", 5), ("mine.tar", 1))
    assert len(worst.keys) == 6


@pytest.mark.parametrize("with_file", [True, False])
def test_damage_of_a_saved_pack_is_not_blamed_on_the_shards(
    tmp_path: Path, with_file: bool
) -> None:
    """12 samples of two shards, all from one tar of packs; what a worker sends is pickled."""
    ledger = Ledger(tmp_path / "data-errors.jsonl" if with_file else None)
    why = "the pack at byte 512 of packs-000000.tar is damaged"
    for n in range(12):
        error = DataError(why, error_class="integrity", file="packs-000000.tar")
        error = pickle.loads(pickle.dumps(error.located(key=f"k{n}", shard=f"s-{n % 2}.tar")))
        lost = SkippedSample(n, f"k{n}", f"s-{n % 2}.tar", n, "integrity", why, error.file)
        ledger.record([lost], epoch=0, batch=1)
    with pytest.raises(DataLimitError, match="12 of the last 20") as caught:
        SkipLimiter(SkipLimits(), ledger).check(samples=20, skipped=12)
    message = str(caught.value)
    assert "Worst files:\n  12 in packs-000000.tar\nWorst samples:\n" in message
    assert f"A typical reason: {why}\n" in message
    assert "run `vlmpack pack` again" in message and "k11 (s-1.tar)" not in message
    assert {line["shard"] for line in ledger.lines()} == {"s-0.tar", "s-1.tar"}


def _write(path: Path, rank: int) -> None:
    ledger = Ledger(path)
    for batch in range(200):
        ledger.record([hole(batch, f"shard-{rank}" + "x" * 300)], epoch=0, batch=batch)


@pytest.mark.slow
def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "data-errors.jsonl"
    context = worker_context()
    processes = [
        context.Process(  # type: ignore[attr-defined]
            target=_write, args=(path, rank)
        )
        for rank in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 600
    assert set(lines[0]) == {
        "class",
        "key",
        "shard",
        "offset",
        "reason",
        "epoch",
        "batch",
        "sample",
        "crc32",
    }


def test_an_unwritable_ledger_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="no-folder"):
        Ledger(tmp_path / "no-folder" / "x.jsonl").record([hole(1)], epoch=0, batch=0)


def test_a_reason_keeps_no_secret_of_an_address(tmp_path: Path) -> None:
    reason = "the image 'https://host/token=canary/x.png?sig=canary' cannot be read"
    lost = SkippedSample(0, "k", "s", 0, "integrity", reason)
    Ledger(tmp_path / "x.jsonl").record([lost], epoch=0, batch=0)
    written = (tmp_path / "x.jsonl").read_text(encoding="utf-8")
    assert "https://host/token=***/x.png?***" in written and "canary" not in written


def test_what_the_policy_skips() -> None:
    policy = OnErrorSection(schema="skip", integrity="raise")
    assert policy.skips("schema") and not policy.skips("integrity") and policy.skips("decode")
    assert not policy.skips("too_long")


def test_a_resumed_run_forgets_the_holes_that_it_will_meet_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "data-errors.jsonl")
    ledger.record([hole(0)], epoch=None, batch=None)  # left out while planning
    for batch in (1, 5, 6):
        ledger.record([hole(batch)], epoch=0, batch=batch)
    ledger.rewind(5)
    assert [line["batch"] for line in ledger.lines()] == [None, 1]


def test_holes_outside_training_are_listed_once_over_launches(tmp_path: Path) -> None:
    for _ in range(2):
        ledger = Ledger(tmp_path / "data-errors.jsonl")
        for _ in range(2):
            ledger.record([hole(0), hole(1)], epoch=None, batch=None)
    assert [line["key"] for line in ledger.lines()] == ["k0", "k1"]


def test_the_budget_survives_a_resume(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "data-errors.jsonl")
    for batch in range(9):
        ledger.record([hole(batch)], epoch=0, batch=batch)
    counts = SkipLimiter(SkipLimits(), ledger)
    counts.replay(batches=20, samples_per_batch=8)
    counts.check(samples=8, skipped=1)
    with pytest.raises(DataLimitError, match="11 of the last"):
        counts.check(samples=8, skipped=1)


def test_holes_that_left_the_window_are_not_replayed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "data-errors.jsonl")
    ledger.record([hole(n) for n in range(11)], epoch=0, batch=3)
    counts = SkipLimiter(SkipLimits(), ledger)
    counts.replay(batches=2000, samples_per_batch=8)


def test_damaged_and_lost_lines_are_said_when_a_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path / "data-errors.jsonl")
    ledger.record([hole(n) for n in range(4)], epoch=0, batch=1)
    ledger.rewind(2, skipped=4)
    assert not caplog.records and len(ledger.lines()) == 4
    text = ledger.path.read_bytes()
    ledger.path.write_bytes(text.replace(b'"k2"', b'"k3"'))
    assert [line["key"] for line in ledger.lines()] == ["k0", "k1", "k3"]
    assert ledger.damaged_lines() == [3]
    ledger.rewind(2, skipped=4)
    assert "1 of 4 lines are cut or damaged" in caplog.text and "line 3" in caplog.text
    assert "has 3 samples skipped in training, the checkpoint counts 4" in caplog.text
    assert len(ledger.path.read_bytes().splitlines()) == 3
    caplog.clear()
    ledger.path.write_bytes(b"")
    ledger.rewind(2, skipped=4)
    assert "has 0 samples skipped" in caplog.text


def test_a_line_without_a_checksum_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "data-errors.jsonl"
    line = {"class": "schema", "key": "k", "shard": "s", "reason": "r", "batch": 1, "epoch": 0}
    path.write_text(json.dumps(line) + "\n")
    Ledger(path).record([hole(1)], epoch=0, batch=9)
    assert Ledger(path).damaged_lines() == [1] and len(Ledger(path).lines()) == 1
