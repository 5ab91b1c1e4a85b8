"""Whole runs of pairs in parallel layouts: the hf engine's steps, one reference for all of them."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from functools import cache
from pathlib import Path

import pytest
from support.forked import run_ranks
from support.pairs import raw_pairs, write_pairs
from support.recipes import changed, rows, run_settings, write_recipe
from support.whole_runs import environment, finetune_in_ranks

from vlmpack.api import resolve, run_recipe
from vlmpack.data.packs.write import PackOrder
from vlmpack.run.packs import pack_recipe
from vlmpack.training.checkpoint import list_checkpoints, step_folder
from vlmpack.training.reference import ReferenceFile

pytestmark = pytest.mark.slow

STEPS = 4
COUNTS = ("step", "num_samples", "num_tokens", "num_label_tokens")
BOUNDS = {"loss": 1e-5, "grad_norm": 1e-5, "chosen_log_p": 1e-5, "margin": 1e-4}
"""Of differences, the first three relative, the stated bound of the project; margins begin at 0."""

ONLINE = {
    "packing__mode": "online",
    "packing__scope": "batch",
    "packing__max_tokens": 640,
    "training__micro_batch_size": 1,
}
LAYOUTS = {
    "cp2": {"parallelism__context": 2, "parallelism__distributed_optimizer": True, **ONLINE},
    "tp2": {"parallelism__tensor": 2, "parallelism__sequence": True, **ONLINE},
    "pp2": {"parallelism__pipeline": 2, "packing__mode": "none"},
    "tp2-cp2": {"parallelism__tensor": 2, "parallelism__context": 2},
}


def settings(root: Path, shards: list[Path], **changes):
    values = {
        "data__train": str(shards[0]),
        "data__validation": str(shards[1]),
        "data__index_dir": str(root / "index"),
        "objective__name": "dpo",
        "objective__sft_weight": 0.1,
        "packing__mode": "in_batch",
        "training__micro_batch_size": 2,
        "training__global_batch_size": 4,
        "training__max_steps": STEPS,
        "checkpoint__interval_steps": 2,
        "evaluation__generate": False,
    }
    return run_settings(root, **(values | changes))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("pair-runs")


@pytest.fixture(scope="module")
def on_hf(root):
    """(settings, run folder) in one process of the hf engine; the index beside it serves all."""
    train = itertools.chain.from_iterable(raw_pairs(seed) for seed in range(3))
    shards = [
        write_pairs(root / f"{name}.tar", list(pairs))
        for name, pairs in (("pairs", train), ("held-out", raw_pairs(9)))
    ]
    values = settings(root, shards, run_dir=str(root / "hf"))
    run_recipe(resolve(values, {}))
    return values, root / "hf"


@pytest.fixture(scope="module")
def trained(on_hf, root):
    """The run folder of a layout. All of them share one reference, which the first of them makes,
    and which the others may not change."""

    @cache
    def run(name, resumed=None):
        reference = root / "reference"
        there = {path: path.read_bytes() for path in reference.rglob("*.*")}
        run_dir = root / (name if resumed is None else f"{resumed}-{name}")
        if resumed is not None:
            shutil.copytree(run(resumed), run_dir)
            shutil.rmtree(step_folder(run_dir / "checkpoints", STEPS))
            (run_dir / "result.json").unlink()
            assert len(list_checkpoints(run_dir / "checkpoints")) == 1
        values = changed(
            on_hf[0],
            run_dir=str(run_dir),
            model__backend="mcore",
            objective__reference_dir=str(reference),
            **LAYOUTS[name],
        )
        recipe = write_recipe(root / f"{run_dir.name}.yaml", values)
        done = finetune_in_ranks(recipe, processes=4 if name == "tp2-cp2" else 2)
        assert done.returncode == 0, done.stderr[-6000:]
        after = {path: path.read_bytes() for path in reference.rglob("*.*")}
        assert not there or after == there, "one layout reads what another has made"
        assert sum(path.suffix == ".part" for path in after) == 2, "of both splits"
        return run_dir

    return run


def validation(run_dir):
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    names = ("validation_loss", "validation_margin", "validation_accuracy")
    return [[line[name] for name in names] for line in lines if "validation_loss" in line][-1]


def assert_same_rows(ours, theirs):
    assert rows(ours, *COUNTS) == rows(theirs, *COUNTS)
    for name, bound in BOUNDS.items():
        found, wanted = ([value for (value,) in rows(run_dir, name)] for run_dir in (ours, theirs))
        far = [
            abs(a - b) / (1 if name == "margin" else abs(b))
            for a, b in zip(found, wanted, strict=True)
        ]
        print(f"\n{ours.name} {name}: {max(far):.1e}")
        assert max(far) < bound, name


def assert_same_steps(ours, theirs):
    assert_same_rows(ours, theirs)
    assert validation(ours) == pytest.approx(validation(theirs), rel=1e-4, abs=1e-4)


def first_row(run_dir):
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return next(line for line in lines if "margin" in line)


@pytest.mark.parametrize(
    "name",
    ["cp2", *(pytest.param(name, marks=pytest.mark.soak) for name in ("pp2", "tp2-cp2"))],
)
def test_a_layout_takes_the_steps_of_the_hf_engine(name, trained, on_hf):
    run_dir = trained(name)
    result = json.loads((run_dir / "result.json").read_text())
    assert result["engine"]["engine"].startswith("mcore")
    assert_same_steps(run_dir, on_hf[1])
    assert first_row(run_dir)["preference_loss"] == pytest.approx(math.log(2), abs=1e-4)
    margins = [abs(margin) for (margin,) in rows(run_dir, "margin")]
    assert margins[0] < 1e-4
    assert max(margins) > 1e-3, "the policy moves away"


@pytest.mark.soak
def test_saved_packs_train_the_same_steps_at_cp_2(on_hf, root):
    """Their shards are gone by then; the reference is made from the packs."""
    folder, run_dir = root / "packs", root / "on-packs"
    values = changed(
        on_hf[0],
        run_dir=str(run_dir),
        model__backend="mcore",
        data__validation=None,
        **LAYOUTS["cp2"],
    )
    pack_recipe(resolve(values, {"parallelism.context": 1}), folder, PackOrder(kind="shards"))
    values = changed(values, packing__mode="offline", packing__path=str(folder))
    shard = Path(values["data"]["train"])
    gone = shard.rename(shard.with_suffix(".gone"))
    try:
        done = finetune_in_ranks(write_recipe(root / "on-packs.yaml", values), processes=2)
    finally:
        gone.rename(shard)
    assert done.returncode == 0, done.stderr[-6000:]
    assert_same_rows(run_dir, on_hf[1])
    assert first_row(run_dir)["preference_loss"] == pytest.approx(math.log(2), abs=1e-4)


def test_a_run_goes_on_in_another_layout_with_the_same_reference(trained, on_hf):
    """CP 2 until step 2, then TP 2 with sequence parallelism."""
    assert_same_steps(trained("tp2", resumed="cp2"), on_hf[1])


def test_the_reference_says_how_it_was_made_and_not_in_which_layout(trained, root):
    trained("cp2")
    facts = json.loads((root / "reference" / "train" / "reference.json").read_text())["facts"]
    assert facts["engine"] == "mcore"
    assert {"dtype", "attention", "weights"} < facts.keys()
    assert not {"tensor", "context", "pipeline", "alignment"} & facts.keys()


@pytest.mark.soak
def test_the_command_makes_the_same_reference_in_another_layout(trained, on_hf, root):
    """`vlmpack reference` at PP 2, over padded rows; the run's is of CP 2 over planned ones."""
    trained("cp2")
    values = changed(
        on_hf[0],
        run_dir=str(root / "command"),
        model__backend="mcore",
        objective__reference_dir=str(root / "by-command"),
        **LAYOUTS["pp2"],
    )
    recipe = write_recipe(root / "command.yaml", values)
    done = run_ranks(["-m", "vlmpack", "reference", recipe], 2, environment=environment())
    assert done.returncode == 0, done.stderr[-6000:]
    assert "train: 18 pairs, 18 of them computed now" in done.stdout
    facts, tables = [], []
    for folder in (root / "reference" / "train", root / "by-command" / "train"):
        facts.append(json.loads((folder / "reference.json").read_text())["facts"])
        tables.append(ReferenceFile(folder, facts[-1], 18).read())
    assert facts[0] == facts[1], "a run of either layout takes both"
    assert abs(tables[0]).min() > 1
    assert abs(tables[0] - tables[1]).max() < 1e-3, "of -40 and less, float32"
