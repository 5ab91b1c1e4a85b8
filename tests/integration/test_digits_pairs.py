"""recipes/digits-dpo.yaml: held-out right readings before wrong ones, and reading as before."""

from __future__ import annotations

import json
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from support.recipes import copy_samples
from support.shards import ROOT, TINY_MODEL

from vlmpack.api import run_recipe
from vlmpack.recipe import load_recipe

RECIPES = ROOT / "recipes"
PAIRS = ROOT / "assets" / "pairs"
BOUND = 0.95
"""Held-out pairs with a margin above 0, ties counted half: what the recipe is there to reach."""
READING_MAY_LOSE = 0.01
"""Of the test questions about reading."""


def finetune(recipe: str, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """A run of a shipped recipe; what it says at its end."""
    settings = {
        "run_dir": run_dir,
        "data.index_dir": run_dir.parent / "index",
        "logging.progress": "none",
    } | {name.replace("__", "."): value for name, value in changes.items()}
    run_recipe(
        load_recipe(RECIPES / recipe, [f"{name}={value}" for name, value in settings.items()])
    )
    result: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return result


def turned_round(source: Path, target: Path) -> None:
    """The same pairs, the wrong reading preferred."""
    with tarfile.open(source) as tar, tarfile.open(target, "w") as out:
        for entry in tar:
            data = tar.extractfile(entry).read()  # type: ignore[union-attr]
            if entry.name.endswith(".json"):
                record = json.loads(data)
                record["chosen"], record["rejected"] = record["rejected"], record["chosen"]
                data = json.dumps(record).encode()
            entry.size = len(data)
            out.addfile(entry, BytesIO(data))


@pytest.mark.soak
def test_a_few_steps_move_held_out_margins_to_the_side_that_was_preferred(tmp_path: Path) -> None:
    right, held_out, wrong = (tmp_path / f"{name}.tar" for name in ("right", "held-out", "wrong"))
    copy_samples(PAIRS / "train-000000.tar", right, 160)
    copy_samples(PAIRS / "val-000000.tar", held_out, 80)
    turned_round(right, wrong)
    found = {}
    for train in (right, wrong):
        result = finetune(
            "digits-dpo.yaml",
            tmp_path / train.stem,
            model__path=TINY_MODEL,
            data__train=train,
            data__validation=held_out,
            data__test="null",
            data__num_workers=0,
            training__max_steps=10,  # one epoch
            evaluation__interval_steps=10,
            evaluation__generate="false",
            export__enabled="false",
        )
        before, after = result["validation_before"], result["validation_after"]
        assert before["accuracy"] == 0.5
        found[train.stem] = after["accuracy"]
    assert found["right"] > 0.7
    assert found["wrong"] < 0.3


def read_share(run_dir: Path, when: str) -> float:
    """Share of the test questions about reading that were answered exactly."""
    lines = (run_dir / f"predictions-{when}.jsonl").read_text().splitlines()
    asked = [row for row in map(json.loads, lines) if row["task"] == "read"]
    assert len(asked) > 200
    return sum(row["correct"] for row in asked) / len(asked)


@pytest.mark.soak
def test_it_prefers_right_readings_and_reads_as_before(tmp_path: Path) -> None:
    """`make demo`, then the whole recipe on what it exports: five minutes of one core."""
    finetune("digits-demo.yaml", tmp_path / "demo")
    result = finetune("digits-dpo.yaml", tmp_path / "dpo", model__path=tmp_path / "demo" / "export")
    assert result["validation_before"]["accuracy"] == 0.5
    assert result["validation_after"]["accuracy"] >= BOUND
    before, after = (read_share(tmp_path / "dpo", when) for when in ("before", "after"))
    assert before > 0.7, "the demo: 80.5%"
    assert after >= before - READING_MAY_LOSE
