"""Each process of a replica reads its own share: runs with a bad image are those of one process.

Audit, ledger and record byte for byte, losses to the project's bound. What a peer is sent is
counted, and what it holds.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import time
from math import prod
from pathlib import Path
from typing import Any

import pytest
from support.forked import check_ranks, run_ranks
from support.layouts import TESTS
from support.recipes import changed, rewrite, rows, run_settings, write_recipe
from support.whole_runs import audited

from vlmpack.api import resolve, run_recipe
from vlmpack.training.checkpoint import step_folder

pytestmark = pytest.mark.slow

WORKER = TESTS / "support" / "replica_runs.py"
STEPS = 6
MICRO_BATCHES = 2
LAYOUTS = {
    "tp2": {"tensor": 2},
    "cp2": {"context": 2},
    "pp2": {"pipeline": 2},
    "tp2-cp2": {"tensor": 2, "context": 2},
    "tp2-cp2-pp2": {"tensor": 2, "context": 2, "pipeline": 2},
}
TOLERANCE = 1e-5
"""Relative, of losses and gradient norms: the stated bound of the project."""


def broken(shard: Path) -> str:
    """Cut the pixels of an image off whose sample has others, its header left whole; its sample."""
    with tarfile.open(shard) as tar:
        names = [name for name in tar.getnames() if name.endswith(".jpg")]
    keys = [name.partition(".")[0] for name in names]
    bad = next(name for name, key in zip(names, keys, strict=True) if keys.count(key) > 1)
    rewrite(shard, lambda name, data: data[: len(data) // 2] if name == bad else data)
    return bad.partition(".")[0]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """A recipe, the sample that cannot be read, and the run of one process on the hf engine."""
    root = tmp_path_factory.mktemp("replica")
    settings = run_settings(
        root,
        training__max_steps=STEPS,
        training__micro_batch_size=4,
        training__global_batch_size=4 * MICRO_BATCHES,
        packing__alignment=4,
        data__on_error={"decode": "skip"},
        checkpoint__interval_steps=2,
    )
    bad = broken(Path(settings["data"]["train"]))
    run_recipe(resolve(settings, {}))
    return settings, bad, Path(settings["run_dir"])


def of_layout(settings: dict[str, Any], name: str, **more: Any) -> dict[str, Any]:
    root = Path(settings["run_dir"]).parent
    return changed(
        settings,
        model__backend="mcore",
        **{f"parallelism__{size}": count for size, count in LAYOUTS[name].items()},
        run_dir=str(root / f"run-{name}"),
        **more,
    )


def run_layouts(settings: dict[str, Any], *names: str) -> None:
    root = Path(settings["run_dir"]).parent
    recipes = [write_recipe(root / f"{name}.json", of_layout(settings, name)) for name in names]
    check_ranks([WORKER, *recipes], prod(LAYOUTS[names[0]].values()))


@pytest.fixture(scope="module")
def two(base: tuple[dict[str, Any], str, Path]) -> None:
    """All layouts of two processes, in one launch."""
    run_layouts(base[0], "tp2", "cp2", "pp2")


@pytest.fixture(scope="module")
def four(base: tuple[dict[str, Any], str, Path]) -> None:
    """TP 2 x CP 2."""
    run_layouts(base[0], "tp2-cp2")


@pytest.fixture(scope="module")
def eight(base: tuple[dict[str, Any], str, Path]) -> None:
    """TP 2 x CP 2 x PP 2."""
    run_layouts(base[0], "tp2-cp2-pp2")


def said(root: Path, name: str) -> list[dict[str, Any]]:
    """What each process said and held."""
    return [json.loads(path.read_text()) for path in sorted(root.glob(f"{name}.[0-9].json"))]


def assert_as_alone(base: tuple[dict[str, Any], str, Path], name: str) -> None:
    _, bad, alone = base
    run = alone.parent / f"run-{name}"
    counts = ("step", "epoch", "num_tokens", "num_label_tokens", "num_samples", "num_skipped")
    assert rows(run, *counts) == rows(alone, *counts)
    for mine, theirs in zip(
        rows(run, "loss", "grad_norm"), rows(alone, "loss", "grad_norm"), strict=True
    ):
        assert mine == pytest.approx(theirs, rel=TOLERANCE)
    for file in ("data-errors.jsonl", "samples/rank-0000.jsonl"):
        assert (run / file).read_bytes() == (alone / file).read_bytes(), file
    lines = [json.loads(line) for line in (run / "data-errors.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == [bad] * 2, "once an epoch"
    assert {line["class"] for line in lines} == {"decode"}
    assert audited(run) == audited(alone)
    assert audited(run).problems == []


@pytest.mark.parametrize("name", ["tp2", "cp2", "pp2"])
def test_a_bad_image_leaves_the_hole_of_one_process(base, two, name: str) -> None:
    assert_as_alone(base, name)


@pytest.mark.soak
def test_and_in_four_processes(base, four) -> None:
    assert_as_alone(base, "tp2-cp2")


@pytest.mark.soak
def test_and_in_eight(base, eight) -> None:
    assert_as_alone(base, "tp2-cp2-pp2")
    assert_sent_and_held(base, "tp2-cp2-pp2")


@pytest.mark.soak
def test_a_bad_image_that_is_not_skipped_ends_all_of_eight_with_its_name(
    base, tmp_path: Path
) -> None:
    values = of_layout(base[0], "tp2-cp2-pp2", data__on_error={"decode": "raise"})
    values["run_dir"] = str(tmp_path / "run")
    done = run_ranks([WORKER, write_recipe(tmp_path / "recipe.json", values)], 8)
    assert all(done.codes)
    for said in done.said:
        assert "DataError" in said and base[1] in said


def assert_sent_and_held(base: tuple[dict[str, Any], str, Path], name: str) -> None:
    found = said(base[2].parent, name)
    size = LAYOUTS[name].get("tensor", 1) * LAYOUTS[name].get("context", 1)
    assert len(found) == size * LAYOUTS[name].get("pipeline", 1)
    for each in found:
        assert len(each["told"]) == 2, "of the bad sample, once an epoch"
        # 8 bytes a step, once more where holes were told, and one for the end.
        assert each["votes"] == [8] * (STEPS + 2 + 1)
        assert len(each["held"]) == STEPS
    for place in range(STEPS):
        held = [each["held"][place] for each in found]
        rows = [sum(row) for row in zip(*held, strict=True)]
        assert len(rows) in (1, MICRO_BATCHES) and min(rows) > 0
        for rank, mine in enumerate(held):
            assert (sum(mine) == 0) == (rank >= size), "stages beyond the first get no pixels"
            assert sum(mine) <= sum(rows) / size + max(rows)


@pytest.mark.parametrize("name", ["tp2", "cp2", "pp2"])
def test_what_a_process_is_sent_and_holds(base, two, name: str) -> None:
    assert_sent_and_held(base, name)


@pytest.mark.soak
def test_what_each_of_four_is_sent_and_holds(base, four) -> None:
    assert_sent_and_held(base, "tp2-cp2")


def test_a_killed_run_goes_on_with_another_layout(base, two) -> None:
    """TP 2 was killed behind step 5, its last checkpoint is of step 2; CP 2 goes on."""
    settings, bad, alone = base
    root, moved = alone.parent, alone.parent / "run-moved"
    shutil.copytree(root / "run-tp2", moved)
    for step in (4, 6):
        shutil.rmtree(step_folder(moved / "checkpoints", step))
    (moved / "result.json").unlink()
    values = of_layout(settings, "cp2") | {"run_dir": str(moved)}
    check_ranks([WORKER, write_recipe(root / "moved.json", values)], 2)
    for mine, theirs in zip(
        rows(moved, "loss", "grad_norm"), rows(alone, "loss", "grad_norm"), strict=True
    ):
        assert mine == pytest.approx(theirs, rel=TOLERANCE)
    assert (moved / "data-errors.jsonl").read_bytes() == (alone / "data-errors.jsonl").read_bytes()
    found = audited(moved)
    assert found.problems == [] and (found.batches, found.launches) == (STEPS, 2)
    assert [epoch.skipped for epoch in found.epochs] == [1, 1]
    assert bad in (moved / "data-errors.jsonl").read_text()


def test_a_reader_that_fails_in_one_process_ends_all(base, tmp_path: Path) -> None:
    values = of_layout(base[0], "tp2") | {"run_dir": str(tmp_path / "run")}
    done = run_ranks(
        [WORKER, write_recipe(tmp_path / "recipe.json", values)],
        2,
        environment={**os.environ, "CONTROL": "fails"},
    )
    assert done.returncode != 0
    assert done.stderr.count("OSError: the disk of one machine is gone") >= 2, "each says the cause"
    assert 0 < len(rows(tmp_path / "run", "step")) < STEPS


@pytest.mark.soak
def test_a_process_that_leaves_the_vote_out_ends_all(base, tmp_path: Path) -> None:
    values = of_layout(base[0], "tp2", parallelism__step_timeout_seconds=5)
    values["run_dir"] = str(tmp_path / "run")
    started = time.monotonic()
    done = run_ranks(
        [WORKER, write_recipe(tmp_path / "recipe.json", values)],
        2,
        environment={**os.environ, "CONTROL": "silent"},
    )
    assert done.returncode != 0 and time.monotonic() - started < 120
    words = (
        "could not agree on the rows of a step",
        "processes of a replica planned different steps",
    )
    assert any(each in done.stderr for each in words), (
        "the others wait, or hear the next step's vote"
    )
