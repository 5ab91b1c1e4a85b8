"""Runs of pairs from end to end: before and after, each pair once and whole, resumed to the bit."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections import Counter
from pathlib import Path

import pytest
from support.pairs import raw_pairs, write_pairs
from support.recipes import rows, run_settings
from support.whole_runs import audited, run_until

from vlmpack.api import resolve, run_recipe
from vlmpack.build.look import open_recipe
from vlmpack.report.run_files import read_run
from vlmpack.report.write import headline, validation_rows, write_report

NUM_PAIRS = 18
COLUMNS = ("loss", "grad_norm", "margin", "accuracy", "chosen_log_p", "num_samples", "num_tokens")


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    pairs = list(itertools.chain.from_iterable(raw_pairs(seed) for seed in range(3)))
    return write_pairs(tmp_path_factory.mktemp("runs-of-pairs") / "pairs.tar", pairs)


def settings(root: Path, shard: Path, **changes):
    values = {
        "data__train": str(shard),
        "data__index_dir": str(root / "index"),
        "objective__name": "dpo",
        "packing__mode": "in_batch",
        "training__micro_batch_size": 2,
        "training__global_batch_size": 4,
        "training__max_steps": 6,
    }
    return run_settings(root, **(values | changes))


@pytest.mark.slow
def test_a_run_says_what_held_out_pairs_were_before_and_are_after(tmp_path, shard, caplog):
    held_out = write_pairs(tmp_path / "held-out.tar", raw_pairs(7))
    values = settings(tmp_path, shard, data__validation=str(held_out), optim__lr=1e-3)
    with caplog.at_level(logging.INFO, "vlmpack"):
        run_recipe(resolve(values, {}))
    assert f"{NUM_PAIRS} pairs, " in caplog.text
    assert "each micro-batch of 2 pairs is one row" in caplog.text
    run_dir = Path(values["run_dir"])
    result = json.loads((run_dir / "result.json").read_text())
    before, after = result["validation_before"], result["validation_after"]
    assert before["step"] == 0
    assert before["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert abs(before["margin"]) < 1e-4
    assert after["step"] == 6
    assert abs(after["margin"]) > 1e-2
    likelier = before["chosen_log_p"], before["rejected_log_p"]
    assert 0 <= before["chosen_likelier"] <= 1
    assert likelier[0] != likelier[1]
    assert [row[0] for row in rows(run_dir, "step")] == [1, 2, 3, 4, 5, 6]
    run = read_run(run_dir)
    shown = {row.name: (row.before, row.after) for row in validation_rows(run)}
    assert shown["chosen log p"] == tuple(f"{x['chosen_log_p']:.4g}" for x in (before, after))
    notes = {figure.name: figure.note for figure in headline(run)}
    accuracy = f"{before['accuracy']:.1%} before training"
    assert notes["held-out pairs with a margin above 0"] == accuracy
    page = (write_report(run_dir) / "index.html").read_text()
    assert accuracy in page and "<h2>Validation</h2>" in page


@pytest.mark.soak
def test_answers_count_as_likelier_whatever_the_reference_says(tmp_path, shard):
    """All pairs turned round: the shares add up to 1, at step 0 where no margin says anything."""
    found = []
    for number, turned in enumerate((False, True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        pairs = [pair[::-1] if turned else pair for pair in raw_pairs(7)]
        held_out = write_pairs(folder / "held-out.tar", pairs)
        values = settings(folder, shard, data__validation=str(held_out), training__max_steps=1)
        run_recipe(resolve(values, {}))
        result = json.loads((folder / "run" / "result.json").read_text())
        found.append(result["validation_before"])
    assert sum(row["chosen_likelier"] for row in found) == pytest.approx(1)
    assert found[0]["chosen_log_p"] == pytest.approx(found[1]["rejected_log_p"])


PLANNED = {
    "packing__mode": "online",
    "packing__scope": "batch",
    "training__micro_batch_size": 1,
}


def lengths_of(tmp_path, shard):
    """Tokens of each pair."""
    train, _ = open_recipe(resolve(settings(tmp_path, shard), {}))
    steps = train.batches(train.start(), rank=0, dp=1, max_steps=5)
    found = []
    for batch in (micro.batch for step in steps for micro in step.micro_batches):
        found += [a + b for a, b in zip(batch.lengths[::2], batch.lengths[1::2], strict=True)]
    assert len(found) == NUM_PAIRS
    return found


@pytest.mark.slow
def test_no_row_holds_half_a_pair_and_a_row_may_be_full_to_the_last_slot(tmp_path, shard):
    """The budget is the longest pair; an epoch has every pair once, in steps of four."""
    most = max(lengths_of(tmp_path, shard))
    changes = {"packing__max_tokens": most, "packing__alignment": 1, "training__seq_length": most}
    train, _ = open_recipe(resolve(settings(tmp_path, shard, **PLANNED, **changes), {}))
    seen, fullest = Counter(), 0
    for step in train.batches(train.start(), rank=0, dp=1, max_steps=5):
        keys = [key for micro in step.micro_batches for key in micro.batch.sequence_keys]
        assert len(keys) == 2 * (4 if len(seen) < 16 else 2)
        for micro in step.micro_batches:
            own = micro.batch.sequence_keys
            assert own[::2] == own[1::2], "both sequences of a pair, side by side"
            assert micro.batch.num_slots <= most
            fullest = max(fullest, micro.batch.num_tokens)
        seen.update(keys[::2])
    assert fullest == most
    assert set(seen.values()) == {1}
    assert len(seen) == NUM_PAIRS


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["in_batch", "online"])
def test_twenty_steps_after_a_stop_are_those_of_a_run_that_never_stopped(
    mode, tmp_path, shard, monkeypatch
):
    """Told to stop between the micro-batches of the eighth step, which is in the second epoch."""
    changes = {**PLANNED, "packing__max_tokens": 640} if mode == "online" else {}
    found = []
    for name, stops in (("whole", ()), ("stopped", (8,))):
        folder = tmp_path / name
        folder.mkdir()
        values = settings(folder, shard, training__max_steps=28, **changes)
        for stop in (*stops, None):
            run_until(values, stop, monkeypatch, total=28)
        assert audited(values["run_dir"]).problems == []
        found.append(rows(Path(values["run_dir"]), *COLUMNS))
    assert found[0] == found[1]
    assert len(found[0]) == 28
    assert len({row[0] for row in found[0]}) == 28, "each step is its own"
