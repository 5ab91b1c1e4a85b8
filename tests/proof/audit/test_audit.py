"""The audit: a whole run is proven, and every way of tampering with its accounts is named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.recorded import BAD, count_steps, launch, open_split, write_lines
from support.shard_fakes import (
    key_of,
    sample_fields,
    write_shard,
)

from vlmpack.build.look import planned_batch
from vlmpack.data.index.parts import read_part, write_part
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.batches import Plan, PlannedBatch, Position
from vlmpack.data.plan.state import DataState
from vlmpack.errors import RunDirError, VlmpackError
from vlmpack.proof.audit import Audit, audit_run
from vlmpack.training.record import (
    SampleName,
    SampleRecord,
    StepSamples,
    read_launches,
    read_steps,
    standing_batches,
    take_back,
)
from vlmpack.training.run_dir import RunDir


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> Path:
    """A run of 2.5 epochs: it crashed twice and went on with another number of replicas."""
    root = tmp_path_factory.mktemp("run")
    run_dir = RunDir(root / "run")
    run_dir.prepare()
    ledger = Ledger(run_dir.data_errors)
    data = open_split(root, ledger)
    assert data.steps_per_epoch() == 4
    launch(run_dir, data, data.start(), stop=5, dp=2, torn=1)
    ledger.rewind(3)
    launch(run_dir, data, state_at(root, 3), stop=8, dp=3)
    ledger.rewind(6)
    launch(run_dir, data, state_at(root, 6), stop=10, dp=1)
    return root


def state_at(root: Path, batch: int) -> DataState:
    """What a checkpoint of that step holds."""
    data = open_split(root, Ledger(None))
    state = data.start()
    for step in data.batches(state, rank=0, dp=1, max_steps=batch):
        state = step.state
    return state


def audited(root: Path) -> Audit:
    return audit_run(RunDir(root / "run"), open_split(root, Ledger(None)))


def test_a_run_over_crashes_and_world_sizes_is_proven(whole: Path) -> None:
    found = audited(whole)
    assert found.problems == [] and found.num_problems == 0
    assert found.batches == 10 and found.launches == 3
    counts = [(e.epoch, e.planned, e.trained, e.skipped, e.pending) for e in found.epochs]
    assert counts == [(0, 14, 12, 2, 0), (1, 14, 12, 2, 0), (2, 14, *counts[2][2:4], 6)]
    assert sum(counts[2][2:4]) == 8 and all(epoch.lost == 0 for epoch in found.epochs)
    assert len(BAD) == 2


def test_the_record_has_the_bins_of_the_unbroken_run(whole: Path) -> None:
    """The last launch alone holds batches 6 to 9; its bins are the plan's, in order."""
    data = open_split(whole, Ledger(None))
    folder = RunDir(whole / "run").samples
    found = {step.batch: step for number, step in read_steps(folder, 0) if number == 3}
    assert sorted(found) == [6, 7, 8, 9]
    for place, planned in enumerate(data.planned(data.start(), 10)):
        if place not in found:
            continue
        names = [[data.split.ref(number).key for number in bin_] for bin_ in planned.bins]
        kept = [[key for key in bin_ if key not in BAD] for bin_ in names]
        assert [[name.key for name in bin_] for bin_ in found[place].bins] == kept
        assert sorted(n.key for n in found[place].holes) == sorted(
            key for bin_ in names for key in bin_ if key in BAD
        )


Tamper = Any


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _drop_line(run_dir: Path) -> None:
    path = run_dir / "samples/rank-0000.jsonl"
    write_lines(path, [line for line in _lines(path) if (line["launch"], line["batch"]) != (3, 7)])


def _drop_a_replicas_line(run_dir: Path) -> None:
    """Shards that it names for the first time are named by the next one: else the file itself says
    that a line is missing."""
    path = run_dir / "samples/rank-0001.jsonl"
    lines = _lines(path)
    place = next(n for n, line in enumerate(lines) if (line["launch"], line["batch"]) == (2, 5))
    named = lines.pop(place).get("shards", {})
    lines[place]["shards"] = named | lines[place].get("shards", {})
    write_lines(path, lines)


def _repeat_line(run_dir: Path) -> None:
    path = run_dir / "samples/rank-0000.jsonl"
    lines = _lines(path)
    place = next(n for n, line in enumerate(lines) if (line["launch"], line["batch"]) == (3, 7))
    write_lines(path, [*lines[: place + 1], *lines[place:]])


def _repeat_key(run_dir: Path) -> None:
    """A sample of batch 8 in the place of one of batch 9: both of epoch 2."""
    path = run_dir / "samples/rank-0000.jsonl"
    lines = {(line["launch"], line["batch"]): line for line in _lines(path)}
    lines[3, 9]["bins"][0][0] = lines[3, 8]["bins"][0][0]
    write_lines(path, list(lines.values()))


def _edit_ledger(run_dir: Path) -> None:
    path = run_dir / "data-errors.jsonl"
    lines = _lines(path)
    lines[0]["key"] = "somebody-else"
    write_lines(path, lines)


def _empty_ledger(run_dir: Path) -> None:
    (run_dir / "data-errors.jsonl").write_text("")


def _swap_epochs(run_dir: Path) -> None:
    path = run_dir / "samples/rank-0000.jsonl"
    lines = _lines(path)
    lines[-1]["epoch"] = 0
    write_lines(path, lines)


def _claim_more_steps(run_dir: Path) -> None:
    folder = run_dir / "checkpoints/step-00000012"
    folder.mkdir(parents=True)
    state = json.dumps({"totals": {"step": 12}}).encode()
    listed = {"state.json": {"bytes": len(state), "sha256": sha256(state).hexdigest()}}
    manifest = json.dumps({"files": listed}).encode()
    (folder / "state.json").write_bytes(state)
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "COMPLETE").write_text(f"step 12 manifest.json {sha256(manifest).hexdigest()}\n")


def _forget_launches(run_dir: Path) -> None:
    (run_dir / "samples/launches.jsonl").unlink()


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (_drop_line, "batch 7 has no record"),
        (_drop_a_replicas_line, "batch 5: replica 1 recorded nothing"),
        (_repeat_line, "batch 7: replica 0 recorded it more than once"),
        (_repeat_key, "in batch 8)"),
        (_edit_ledger, "the ledger says that somebody-else"),
        (_empty_ledger, "was skipped, but the ledger has no line"),
        (_swap_epochs, "batch 9 is recorded in epoch [0], planned in 2"),
        (_claim_more_steps, "step-00000012 holds 12 steps, the record 10"),
        (_forget_launches, "holds no record"),
    ],
)
def test_tampering_is_named(whole: Path, tmp_path: Path, tamper: Tamper, message: str) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    tamper(tmp_path / "copy/run")
    found = audit_run(RunDir(tmp_path / "copy/run"), open_split(whole, Ledger(None)))
    assert found.num_problems > 0
    assert message in "\n".join(found.problems)


def test_a_lost_record_is_named_by_every_other_account(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.prepare()
    data = open_split(tmp_path, Ledger(run_dir.data_errors))
    launch(run_dir, data, data.start(), stop=5, dp=1)
    assert count_steps(run_dir) == 5 and audited(tmp_path).problems == []
    (run_dir.samples / "rank-0000.jsonl").unlink()
    by_metrics, by_result = audited(tmp_path).problems
    assert by_metrics == "metrics.jsonl has 5 steps, the record 0: the rest is missing"
    assert by_result == "result.json counts 5 steps, the record 0: the rest is missing"
    run_dir.metrics.unlink()
    assert audited(tmp_path).problems == [by_result]


def test_a_lost_last_launch_is_named(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    run_dir = RunDir(tmp_path / "copy/run")
    audit = lambda: audit_run(run_dir, open_split(whole, Ledger(None)))  # noqa: E731
    assert count_steps(run_dir) == 10 and audit().problems == []
    path = run_dir.samples / "rank-0000.jsonl"
    write_lines(path, [line for line in _lines(path) if line["launch"] != 3])
    found = audit()
    assert found.batches == 6
    assert found.problems == [
        "metrics.jsonl has 10 steps, the record 6: the rest is missing",
        "result.json counts 10 steps, the record 6: the rest is missing",
    ]


def test_what_a_launch_takes_back_counts_no_more(tmp_path: Path) -> None:
    """A finished run that goes back to step 2 and is killed before its first step is proven."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.prepare()
    data = open_split(tmp_path, Ledger(run_dir.data_errors))
    launch(run_dir, data, data.start(), stop=5, dp=1)
    count_steps(run_dir)
    run_dir.audit.write_text("{}")
    take_back(run_dir, 5)
    assert len(_lines(run_dir.metrics)) == 5
    assert not run_dir.result.exists(), "the run is not at its end any more"
    assert not run_dir.audit.exists(), "what was proven is of the run as it stood"
    assert _lines(run_dir.path / "result.json.old")[0]["steps"] == 5
    take_back(run_dir, 2)
    Ledger(run_dir.data_errors).rewind(2)
    launch(run_dir, data, state_at(tmp_path, 2), stop=2, dp=1)
    found = audited(tmp_path)
    assert (found.batches, found.problems) == (2, [])
    assert len(_lines(run_dir.metrics)) == 2 and not run_dir.result.exists()


def test_the_main_rank_may_be_a_step_ahead_of_a_torn_batch(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.prepare()
    data = open_split(tmp_path, Ledger(run_dir.data_errors))
    launch(run_dir, data, data.start(), stop=3, dp=2, torn=1)
    count_steps(run_dir)
    run_dir.result.unlink()
    assert len(_lines(run_dir.metrics)) == 4
    found = audited(tmp_path)
    assert (found.batches, found.problems) == (3, []) and "1 of 2 replicas" in found.notes[0]
    write_lines(run_dir.metrics, [*_lines(run_dir.metrics), {"step": 5, "loss": 1.0}])
    assert audited(tmp_path).problems == [
        "metrics.jsonl has 5 steps, the record 3: the rest is missing"
    ]


def test_a_missing_line_that_named_a_shard_is_an_error(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    path = tmp_path / "copy/run/samples/rank-0000.jsonl"
    lines = _lines(path)
    assert "shards" in lines[0]
    write_lines(path, lines[1:])
    with pytest.raises(RunDirError, match=r"rank-0000.jsonl, line 1: .*lines before it are miss"):
        audited(tmp_path / "copy")


def test_changed_data_cannot_be_audited(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "run", tmp_path / "run")
    other = open_split(whole, Ledger(None), seed=8)
    found = audit_run(RunDir(tmp_path / "run"), other)
    assert found.epochs == []
    assert "data.seed: the run has 7, now 8" in found.problems[0]


def test_a_line_cut_by_a_kill_is_dropped_and_written_anew(tmp_path: Path) -> None:
    root = tmp_path
    run_dir = RunDir(root / "run")
    run_dir.prepare()
    data = open_split(root, Ledger(run_dir.data_errors))
    launch(run_dir, data, data.start(), stop=3, dp=1)
    path = run_dir.samples / "rank-0000.jsonl"
    whole_text = path.read_bytes()
    path.write_bytes(whole_text[:-20])
    assert audited(root).batches == 2, "the cut line counts"
    Ledger(run_dir.data_errors).rewind(2)
    launch(run_dir, data, state_at(root, 2), stop=5, dp=1)
    found = audited(root)
    assert found.problems == [] and found.batches == 5
    assert len(_lines(path)) == 2 + 3


def test_a_launch_without_a_step_takes_back_what_it_did_not_load(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.prepare()
    data = open_split(tmp_path, Ledger(run_dir.data_errors))
    launch(run_dir, data, data.start(), stop=5, dp=1)
    assert audited(tmp_path).batches == 5
    launch(run_dir, data, state_at(tmp_path, 2), stop=2, dp=1)
    found = audited(tmp_path)
    assert (found.batches, found.problems) == (2, [])
    assert [epoch.pending for epoch in found.epochs] == [14 - 8]


def test_names_with_slashes_and_other_letters_come_back(tmp_path: Path) -> None:
    names = tuple(
        SampleName(f"s3://b/{shard}.tar", key) for shard in "ab" for key in ("x/1", "\u00e4/\udc80")
    )
    step = StepSamples(0, 0, (names[:2], (), names[2:]), (names[0],))
    (tmp_path / "samples").mkdir()
    record = SampleRecord(tmp_path / "samples", dp_rank=0, launch=1)
    record.write(step)
    record.write(step)
    record.close()
    assert [found for _, found in read_steps(tmp_path / "samples", 0)] == [step, step]
    second = (tmp_path / "samples/rank-0000.jsonl").read_text().splitlines()[1]
    assert "s3://" not in second, "shards are named once a launch"


def test_epochs_by_weight_are_proven_too(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.prepare()
    data = open_split(tmp_path, Ledger(run_dir.data_errors), weighted=True)
    assert data.config.weighted
    launch(run_dir, data, data.start(), stop=3 * data.steps_per_epoch(), dp=2)
    found = audit_run(run_dir, open_split(tmp_path, Ledger(None), weighted=True))
    assert found.problems == [] and len(found.epochs) == 3
    assert sum(epoch.trained + epoch.skipped for epoch in found.epochs) == 3 * 10


def _patched(monkeypatch: Any, change: Any) -> None:
    """Break the plan itself: the run and its audit then agree with each other, but on nonsense."""
    original = Plan.window_order
    monkeypatch.setattr(Plan, "window_order", lambda self, e, w: change(original(self, e, w)))


@pytest.mark.parametrize("weighted", [False, True])
def test_a_plan_that_loses_or_repeats_a_sample_is_named(
    tmp_path: Path, monkeypatch: Any, weighted: bool
) -> None:
    def lose_one(order: Any) -> Any:
        return np.concatenate([order[:1], order[:1], order[2:]])

    _patched(monkeypatch, lose_one)
    run_dir = RunDir(tmp_path / "run")
    run_dir.prepare()
    data = open_split(tmp_path, Ledger(run_dir.data_errors), weighted=weighted)
    launch(run_dir, data, data.start(), stop=4 * data.steps_per_epoch(), dp=1)
    again = open_split(tmp_path, Ledger(None), weighted=weighted)
    text = "\n".join(audit_run(run_dir, again).problems)
    if weighted:
        assert "times since the start: " in text or "samples are planned since the start" in text
    else:
        assert "epoch 0: in the index, but not planned: " in text
        assert "epoch 0: planned more often than the index has: " in text


@pytest.mark.parametrize("stop", [4, 6])
def test_an_epoch_whose_last_window_is_empty_is_checked(
    tmp_path: Path, monkeypatch: Any, stop: int
) -> None:
    """No batch of it is followed by one of the next epoch. The record ends there, or later."""

    def stay(batch: PlannedBatch) -> PlannedBatch:
        if batch.following.epoch == batch.position.epoch:
            return batch
        return replace(batch, following=Position(batch.position.epoch, 1, 0))

    original = Plan.walk
    monkeypatch.setattr(Plan, "walk", lambda *args: map(stay, original(*args)))
    run_dir = RunDir(tmp_path / "run")
    run_dir.prepare()
    data = open_split(tmp_path, Ledger(run_dir.data_errors))
    assert data.steps_per_epoch() == 4
    with monkeypatch.context() as patch:
        _patched(patch, lambda order: np.concatenate([order[:1], order[:1], order[2:]]))
        launch(run_dir, data, data.start(), stop=stop, dp=1)
        found = audited(tmp_path)
    assert [epoch.planned for epoch in found.epochs] == [14] * -(-stop // 4)
    for epoch in range(len(found.epochs)):
        for kind in ("in the index, but not planned", "planned more often than the index has"):
            assert sum(f"epoch {epoch}: {kind}" in line for line in found.problems) == 1


def test_samples_left_out_as_too_long_are_in_the_ledger(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.prepare()
    options: dict[str, Any] = {"seq_length": 13, "over_long": "drop"}
    data = open_split(tmp_path, Ledger(run_dir.data_errors), **options)
    num_dropped = len(data.fitted.dropped)
    assert 0 < num_dropped < 8
    launch(run_dir, data, data.start(), stop=3, dp=1)
    again = open_split(tmp_path, Ledger(None), **options)
    assert audit_run(run_dir, again).problems == []
    lines = _lines(run_dir.data_errors)
    dropped = [line for line in lines if line["class"] == "too_long"]
    assert len(dropped) == num_dropped
    write_lines(run_dir.data_errors, [line for line in lines if line != dropped[0]])
    found = audit_run(run_dir, again).problems
    assert found == [
        f"left out as too long, but not in the ledger: {dropped[0]['key']} ({dropped[0]['shard']})"
    ]
    write_lines(run_dir.data_errors, [*lines, {**dropped[0], "key": key_of(0)}])
    assert "the ledger calls these too long" in audit_run(run_dir, again).problems[0]


def test_after_a_change_of_data_the_new_part_is_compared(tmp_path: Path) -> None:
    """An era of its own; going back to a checkpoint before it begins another one there."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.prepare()
    ledger = Ledger(run_dir.data_errors)
    launch(run_dir, open_split(tmp_path, ledger), state_at(tmp_path, 0), stop=6, dp=1)
    old = [state_at(tmp_path, batch) for batch in (5, 3)]
    write_shard(tmp_path / "data/s-9.tar", [(key_of(n), sample_fields(n)) for n in range(20, 26)])
    for state in old:
        ledger.rewind(state.batches)
        data = open_split(tmp_path, ledger, new_era=True)
        launch(run_dir, data, data.admit(state), stop=10, dp=1)
    found = audited(tmp_path)
    assert found.problems == [] and (found.batches, found.launches) == (10, 3)
    assert "the first 3 global batches have another plan" in found.notes[0]
    assert found.epochs[0].planned == 20 and found.epochs[0].pending == 0
    path = run_dir.samples / "rank-0000.jsonl"
    write_lines(path, [line for line in _lines(path) if (line["launch"], line["batch"]) != (3, 4)])
    assert "batch 4 has no record" in audited(tmp_path).problems[0]


def test_a_shown_batch_is_the_one_that_was_trained(tmp_path: Path) -> None:
    """Data A, then B as an era of its own, then A again: only what A planned can be shown."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.prepare()
    ledger = Ledger(run_dir.data_errors)
    first = open_split(tmp_path, ledger)
    launch(run_dir, first, first.start(), stop=6, dp=1)
    state = state_at(tmp_path, 5)
    write_shard(tmp_path / "data/s-9.tar", [(key_of(n), sample_fields(n)) for n in range(20, 26)])
    for stop in (8, 11):
        ledger.rewind(state.batches)
        data = open_split(tmp_path, ledger, new_era=True)
        state = data.admit(state)
        launch(run_dir, data, state, stop=stop, dp=1)
        if stop == 8:
            show_and_compare(run_dir, data, shown=range(5, 8), refused=range(5))
            *_, last = data.batches(state, rank=0, dp=1, max_steps=8)
            state = last.state
            (tmp_path / "data/s-9.tar").unlink()
    show_and_compare(run_dir, data, shown=[*range(5), 8, 9, 10], refused=range(5, 8))
    other = open_split(tmp_path, Ledger(None), seed=8)
    with pytest.raises(VlmpackError, match=r"--batch 9: .*from batch 8 .*has 7, now 8. Restore"):
        planned_batch(other, 9, run_dir)


def show_and_compare(run_dir: RunDir, data: TrainData, *, shown: Any, refused: Any) -> None:
    """What is shown is what the record says."""
    records = standing_batches(run_dir.samples, read_launches(run_dir.samples))
    trained = {record.batch: sorted(record.trained + record.holes) for record in records}
    for batch in shown:
        refs = [data.ref(n) for bin_ in planned_batch(data, batch, run_dir).bins for n in bin_]
        assert sorted(SampleName(ref.shard, ref.key) for ref in refs) == trained[batch]
    for batch in refused:
        with pytest.raises(VlmpackError, match=rf"--batch {batch}: .*data.train"):
            planned_batch(data, batch, run_dir)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_samples_that_the_index_lacks_are_counted_in_the_shards(
    tmp_path: Path, shuffle: str
) -> None:
    """A whole index file, digest and all, that lists 2 of 5 samples: every other account agrees."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.prepare()
    open_split(tmp_path, Ledger(None), shuffle=shuffle).split.index_all()
    for kind in ("index", "lengths"):
        (part,) = (tmp_path / "index").glob(f"s-1.*.{kind}.part")
        table = read_part(str(part))
        write_part(str(part), table.slice(0, 2), table.schema.metadata or {})
    for copy in (tmp_path / "index").glob("*.table"):
        copy.unlink()
    data = open_split(tmp_path, Ledger(run_dir.data_errors), shuffle=shuffle)
    launch(run_dir, data, data.start(), stop=4, dp=1)
    assert count_steps(run_dir) == 4
    found = audit_run(run_dir, open_split(tmp_path, Ledger(None), shuffle=shuffle))
    assert found.epochs[0].planned == 11, "else the index was made again and nothing is missing"
    (problem,) = found.problems
    assert "s-1.tar holds 5 samples, its index 2" in problem
    assert ", ".join(key_of(n) for n in (7, 8, 9)) in problem


def test_a_damaged_checkpoint_does_not_count_and_is_said(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    run_dir = RunDir(tmp_path / "copy/run")
    _claim_more_steps(run_dir.path)
    state = run_dir.checkpoints / "step-00000012/state.json"
    for damaged in (state.read_bytes().replace(b"12", b"13"), b"{", b""):
        state.write_bytes(damaged)
        found = audit_run(run_dir, open_split(whole, Ledger(None)))
        assert found.problems == []
        assert any("step-00000012 is unfinished or damaged" in note for note in found.notes)
    run_dir.result.write_text("{")
    found = audit_run(run_dir, open_split(whole, Ledger(None)))
    assert "result.json cannot be read" in found.problems[0]
