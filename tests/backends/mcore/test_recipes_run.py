"""The digits recipes in parallel layouts take the steps of digits-demo.yaml in one process."""

from __future__ import annotations

import contextlib
import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.recipes import rows
from support.shards import ROOT
from support.whole_runs import finetune_in_ranks, launch

from vlmpack.api import run_recipe
from vlmpack.recipe import load_recipe
from vlmpack.training.checkpoint import list_checkpoints, step_folder

pytestmark = pytest.mark.slow

STEPS = 4
COUNTS = ("step", "epoch", "num_tokens", "num_label_tokens", "num_samples")

LAYOUTS = {
    "tp2": "TP 2 x CP 1 x PP 1, 1 replicas",
    "cp2": "TP 1 x CP 2 x PP 1, 1 replicas",
    "pp2": "TP 1 x CP 1 x PP 2, 1 replicas",
}

LAUNCHED = "digits-tp2"
"""The one that torchrun starts, as users do."""

TOLERANCE = 1e-5
"""Relative, of losses and gradient norms: the stated bound of the project."""

ONE_ROUNDING = 2**-7
"""Relative: exports are bfloat16, and values that agree in float32 may round to neighbours."""
FLOAT32_NOISE = 1e-6
"""Absolute: what float32 weights may differ by where AdamW divides by tiny moments."""


def finetune(recipe, run_dir, processes, **overrides):
    """As `vlmpack finetune` does, small: one shard, a short validation, no generated answers."""
    settings = {
        "run_dir": run_dir,
        "data.train": "assets/digits/train-000000.tar",
        "training.max_steps": STEPS,
        "data.index_dir": run_dir.parent / "index",
        "data.num_workers": 0,
        "evaluation.generate": "false",
        "logging.progress": "none",
    } | overrides
    values = [f"{name}={value}" for name, value in settings.items()]
    if processes == 1:  # this one
        run_recipe(load_recipe(ROOT / "recipes" / f"{recipe}.yaml", values))
    else:
        start = launch if recipe == LAUNCHED else finetune_in_ranks
        done = start(Path("recipes", f"{recipe}.yaml"), *values, processes=processes)
        assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((run_dir / "result.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True, scope="module")
def at_the_root():
    """The recipes' paths start there."""
    with contextlib.chdir(ROOT):
        yield


def exported(run_dir):
    return {
        name: value
        for path in (run_dir / "export").glob("*.safetensors")
        for name, value in load_file(str(path)).items()
    }


def assert_same_steps(ours, reference):
    assert rows(ours, *COUNTS) == rows(reference, *COUNTS)
    found, expected = (rows(run, "loss", "grad_norm") for run in (ours, reference))
    assert len(found) == STEPS
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=TOLERANCE)


def validation_losses(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["validation_loss"] for row in map(json.loads, lines) if "validation_loss" in row]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """digits-demo.yaml on the hf engine; the index beside it serves all runs."""
    run_dir = tmp_path_factory.mktemp("recipes") / "demo"
    assert finetune("digits-demo", run_dir, 1)["engine"]["engine"].startswith("hf")
    losses = [loss for (loss,) in rows(run_dir, "loss")]
    assert len(set(losses)) == STEPS
    return run_dir


@pytest.fixture(scope="module")
def finetuned(demo):
    """A recipe's run of two processes, and its result; checkpoints of every second step."""

    @cache
    def run(name):
        run_dir = demo.parent / name
        return run_dir, finetune(f"digits-{name}", run_dir, 2, **{"checkpoint.interval_steps": 2})

    return run


@pytest.mark.cases(slow="tp2")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_recipe_takes_the_steps_of_the_demo(demo, finetuned, name):
    run_dir, result = finetuned(name)
    assert result["engine"]["engine"].startswith("mcore (megatron-core ")
    assert result["engine"]["processes"] == f"2 ({LAYOUTS[name]})"
    assert_same_steps(run_dir, demo)
    assert validation_losses(run_dir) == pytest.approx(validation_losses(demo), rel=TOLERANCE)
    ours, theirs = exported(run_dir), exported(demo)
    assert ours.keys() == theirs.keys()
    worst, flipped = 0.0, 0
    for key, value in theirs.items():
        mine = ours[key]
        assert mine.dtype is value.dtype
        difference = (mine.double() - value.double()).abs()
        flipped += int((difference > 0).sum())
        worst = max(worst, float((difference - ONE_ROUNDING * value.double().abs()).max()))
        assert mine.shape == value.shape
    total = sum(value.numel() for value in theirs.values())
    print(f"\n{name}: {flipped} of {total} differ, beyond a rounding by at most {worst:.1e}")
    assert worst <= FLOAT32_NOISE
    assert flipped < 1e-4 * total


@pytest.mark.soak
def test_adapters_take_the_steps_of_the_hf_engine(demo):
    """And leave the same files, which hold the same weights."""
    runs = [demo.parent / name for name in ("lora", "lora-tp2")]
    for run_dir, processes in zip(runs, (1, 2), strict=True):
        result = finetune(f"digits-{run_dir.name}", run_dir, processes)
    assert result["engine"]["processes"] == "2 (TP 2 + SP x CP 1 x PP 1, 1 replicas)"
    reference, ours = runs
    assert_same_steps(ours, reference)
    theirs, mine = (
        load_file(str(run_dir / "adapter" / "adapter_model.safetensors")) for run_dir in runs
    )
    assert {n: v.shape for n, v in mine.items()} == {n: v.shape for n, v in theirs.items()}
    assert all(torch.allclose(mine[n], v, rtol=1e-3, atol=1e-5) for n, v in theirs.items())
    assert all(value.any() for value in theirs.values())
    assert exported(ours).keys() == exported(reference).keys()


@pytest.mark.parametrize(
    "stages",
    [[], pytest.param([("digits-pp2", 3)], marks=pytest.mark.soak)],
    ids=["tp2", "tp2, pp2"],
)
def test_a_run_goes_on_with_another_layout_and_on_the_other_engine(demo, finetuned, stages):
    """One run folder: TP 2 until step 2, as if it was killed later on; then perhaps another layout,
    then the hf engine in one process; warmup all along."""
    run_dir = demo.parent / f"moved-{len(stages)}"
    shutil.copytree(finetuned("tp2")[0], run_dir)
    shutil.rmtree(step_folder(run_dir / "checkpoints", STEPS))
    (run_dir / "result.json").unlink()
    assert [path.name for path in list_checkpoints(run_dir / "checkpoints")] == ["step-00000002"]
    for recipe, steps in stages:
        finetune(recipe, run_dir, 2, **{"checkpoint.interval_steps": 1, "checkpoint.keep": STEPS})
        for step in range(steps + 1, STEPS + 1):
            shutil.rmtree(step_folder(run_dir / "checkpoints", step))
        (run_dir / "result.json").unlink()
    result = finetune("digits-demo", run_dir, 1)
    assert result["engine"]["engine"].startswith("hf")
    assert result["steps"] == STEPS
    assert_same_steps(run_dir, demo)
    assert validation_losses(run_dir)[-1] == pytest.approx(
        validation_losses(demo)[-1], rel=TOLERANCE
    )
