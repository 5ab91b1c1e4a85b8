"""Runs on files of records are those on shards of the same samples: in 1, 2 and 4 processes, and
stopped amid an epoch and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.recipes import changed, rows, write_recipe
from support.record_data import write_records, write_same_shards
from support.whole_runs import assert_same_steps, audited, finetune_in_ranks, run_until

COUNT, STEPS, PER_EPOCH = 24, 8, 3
EXACT = ("step", "epoch", "loss", "grad_norm", "num_tokens", "num_label_tokens", "num_samples")


@pytest.fixture
def on_shards(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """The recipe of a run of one process on shards, which is done."""
    values = run_on(settings, tmp_path, "tar")
    run_until(values, None, monkeypatch, total=STEPS)
    assert len(set(rows(values["run_dir"], "loss"))) == STEPS, "guard: something is learned"
    return values


def run_on(settings: dict[str, Any], folder: Path, kind: str) -> dict[str, Any]:
    """A recipe that trains the same samples from one kind of file, which is written."""
    at = folder / kind.replace(" ", "-")
    at.mkdir()
    numbers = range(COUNT)
    path = write_same_shards(at, numbers) if kind == "tar" else write_records(at, kind, numbers)
    return changed(
        settings,
        data__train=[{"name": "digits", "path": path}],
        data__shuffle="global",
        data__index_dir=str(at / "index"),
        training__micro_batch_size=2,
        training__global_batch_size=8,
        training__max_steps=STEPS,
        run_dir=str(at / "run"),
    )


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["jsonl", "parquet of bytes"])
def test_a_run_on_files_is_that_on_shards_stopped_and_resumed_too(
    settings: dict[str, Any],
    on_shards: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """SIGTERM in the second epoch; then on. Bit for bit."""
    values = run_on(settings, tmp_path, kind)
    run_until(values, PER_EPOCH + 2, monkeypatch, total=STEPS)
    assert len(rows(values["run_dir"], "step")) == PER_EPOCH + 2, "guard: amid an epoch"
    run_until(values, None, monkeypatch, total=STEPS)
    assert rows(values["run_dir"], *EXACT) == rows(on_shards["run_dir"], *EXACT)
    audit = audited(values["run_dir"])
    assert audit.batches == STEPS and audit.launches == 2
    assert (audit.epochs[0].trained, audit.epochs[0].pending) == (COUNT, 0)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "processes"),
    [
        ("jsonl", 2),
        pytest.param("jsonl", 4, marks=pytest.mark.soak),
        pytest.param("parquet of bytes", 2, marks=pytest.mark.soak),
        pytest.param("parquet of bytes", 4, marks=pytest.mark.soak),
    ],
)
def test_ranks_on_files_take_the_steps_of_one_on_shards(
    settings: dict[str, Any],
    on_shards: dict[str, Any],
    tmp_path: Path,
    kind: str,
    processes: int,
) -> None:
    values = run_on(settings, tmp_path, kind)
    done = finetune_in_ranks(write_recipe(tmp_path / "recipe.json", values), processes=processes)
    assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = Path(values["run_dir"]), Path(on_shards["run_dir"])
    assert_same_steps(ours, theirs, STEPS)
    assert audited(ours).batches == STEPS
