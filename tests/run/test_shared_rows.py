"""Runs of the hf engine whose processes share rows: the losses of one process, at any number of
them, through checkpoints and into the other engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.forked import check_ranks
from support.pairs import raw_pairs, write_pairs
from support.recipes import changed, rows, run_settings, write_recipe

STEPS = 8
COLUMNS = ("step", "num_tokens", "num_samples", "loss")
RELATIVE = 1e-5

LAUNCHES: tuple[tuple[dict[str, Any], int], ...] = (
    ({"parallelism__context": 4}, 4),
    ({"parallelism__context": 4, "parallelism__context_heads": 1}, 4),
    (
        {
            "parallelism__context": 2,
            "parallelism__sharding": "fsdp",
            "training__sentinel_interval": 1,
        },
        2,
    ),
    ({}, 1),
    ({"parallelism__context": 2, "model__backend": "mcore"}, 2),
)
"""What each launch changes, and its processes. The first has rings of two, the next one of four."""


def trained(recipe: Path, settings: dict[str, Any], processes: int) -> None:
    check_ranks(["-m", "vlmpack", "finetune", write_recipe(recipe, settings)], processes)


def settings_of(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return run_settings(
        tmp_path,
        training__max_steps=STEPS,
        training__micro_batch_size=4,
        training__global_batch_size=8,
        optim__schedule="constant",
        model__dtype="float32",
        **changes,
    )


def assert_same(ours: Path, theirs: Path) -> None:
    mine, others = (rows(folder, *COLUMNS) for folder in (ours, theirs))
    assert len(mine) == len(others) == STEPS
    for row, other in zip(mine, others, strict=True):
        assert row[:-1] == other[:-1]
        assert row[-1] == pytest.approx(other[-1], rel=RELATIVE)


@pytest.mark.megatron
@pytest.mark.slow
def test_a_run_goes_on_with_any_number_of_processes_to_a_row(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    trained(tmp_path / "one.json", changed(settings, run_dir=str(tmp_path / "one")), 1)
    for number, (changes, processes) in enumerate(LAUNCHES, 1):
        steps = STEPS * number // len(LAUNCHES)
        more = changed(settings, training__max_steps=steps, **changes)
        trained(tmp_path / f"{number}.json", more, processes)
    assert_same(Path(settings["run_dir"]), tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"packing__mode": "none"}, id="padded"),
        pytest.param(
            {
                "packing__mode": "online",
                "packing__max_tokens": 512,
                "training__micro_batch_size": 1,
                "training__global_batch_size": 2,
                "trainable__language": "lora",
                "trainable__vision": "frozen",
            },
            id="planned rows, adapters",
        ),
        pytest.param({"objective": {"name": "dpo"}, "training__micro_batch_size": 2}, id="pairs"),
        pytest.param(
            {
                "objective": {"name": "dpo", "reference": "adapters_off"},
                "packing__mode": "online",
                "packing__scope": "batch",
                "packing__max_tokens": 528,
                "parallelism__sharding": "fsdp",
                "parallelism__context_heads": 1,
                "training__micro_batch_size": 1,
                "trainable": {"vision": "frozen", "projector": "frozen", "language": "lora"},
            },
            id="planned pairs on a ring, adapters",
        ),
    ],
)
def test_two_processes_train_as_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    settings = changed(settings_of(tmp_path), packing__alignment=8, **changes)
    if "objective" in changes:
        write_pairs(tmp_path / "pairs.tar", raw_pairs(0) * 4)
        settings = changed(settings, data__train=str(tmp_path / "pairs.tar"))
    for name, size in (("one", 1), ("two", 2)):
        own = changed(settings, run_dir=str(tmp_path / name), parallelism__context=size)
        trained(tmp_path / f"{name}.json", own, size)
    assert_same(tmp_path / "two", tmp_path / "one")
