"""A replica that differs from its peers ends the run before the next save, with both sides named.

A bit is flipped in one rank after step 3 of runs that save every second step. Each fault is planted
in the weights or moments themselves. The run must end at step 4 on all ranks, with the checkpoint
of step 2 as the newest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.forked import check_ranks
from support.recipes import rows, run_settings, write_recipe
from training import compared

MCORE = {"model__backend": "mcore"}
DROPOUT = {"trainable__language": "lora", "trainable__lora": {"rank": 4, "dropout": 0.1}}
NORM = "model.language_model.layers.0.input_layernorm.weight"
MOMENT = f"exp_avg of {NORM}"
BUFFER = "model.language_model.rotary_emb.inv_freq"
"""DDP sends rank 0's buffers to all before each forward pass; FSDP2 does not."""


class Job(NamedTuple):
    """A run, and what is planted in it."""

    changes: dict[str, Any]
    fault: str = ""
    what: str = ""


TWO = {
    "ddp weight": Job({}, "flip", NORM),
    "ddp moment": Job({}, "flip", MOMENT),
    "ddp off": Job({}, "off", NORM),
    "ddp clean": Job(DROPOUT),
    "ddp seed": Job(DROPOUT, "seed"),
    "ddp learning rate": Job({}, "learning rate"),
    "ddp position": Job({}, "position"),
    "fsdp clean": Job({"parallelism__sharding": "fsdp"}),
    "fsdp buffer": Job({"parallelism__sharding": "fsdp"}, "flip", BUFFER),
}
MCORE_TWO = {
    "dp weight": Job(MCORE | {"parallelism__distributed_optimizer": False}, "flip", NORM),
    "dp moment": Job(MCORE | {"parallelism__distributed_optimizer": False}, "flip", MOMENT),
    "tp norm": Job(MCORE | {"parallelism__tensor": 2}, "flip", NORM),
    "tp off": Job(MCORE | {"parallelism__tensor": 2}, "off", NORM),
    "tp clean": Job(MCORE | {"parallelism__tensor": 2}),
    "pp clean": Job(MCORE | {"parallelism__pipeline": 2}),
}
THREE = {"ddp of three": Job({"training__global_batch_size": 12}, "flip", NORM)}
HSDP = {
    "parallelism__sharding": "fsdp",
    "parallelism__replicate": 2,
    "training__global_batch_size": 8,
}
FOUR = {"hsdp clean": Job(HSDP), "hsdp moment": Job(HSDP, "flip", MOMENT)}


class Ended(NamedTuple):
    """How a run ended, on each rank."""

    errors: list[list[str | None]]
    said: list[str]
    saved: list[int]
    rows: list[tuple[Any, ...]]


def launch(root: Path, jobs: dict[str, Job], processes: int) -> dict[str, Ended]:
    """The jobs in processes that all of them share."""
    arguments, folders = [], {}
    for name, job in jobs.items():
        folder = root / name.replace(" ", "-")
        folder.mkdir()
        settings = run_settings(
            root,
            **{
                "run_dir": str(folder / "run"),
                "training__max_steps": 5,
                "training__micro_batch_size": 2,
                "checkpoint__interval_steps": 2,
                **job.changes,
            },
        )
        recipe = write_recipe(folder / "recipe.json", settings)
        arguments.append(f"{recipe}:{job.fault}:{job.what}")
        folders[name] = folder
    check_ranks([compared.__file__, *arguments], processes)
    return {name: ended(folder, processes) for name, folder in folders.items()}


def ended(folder: Path, processes: int) -> Ended:
    found = [json.loads((folder / f"recipe.{rank}.json").read_text()) for rank in range(processes)]
    saved = sorted(int(path.name[-8:]) for path in (folder / "run/checkpoints").glob("step*"))
    return Ended(
        [each["error"] for each in found],
        found[0]["said"],
        saved,
        rows(folder / "run", "loss", "grad_norm"),
    )


def assert_found(run: Ended, *words: str, step: int = 4, agreed: int = 2) -> None:
    """It ended before the save of a step, on all ranks with the same words."""
    assert len({tuple(error) for error in run.errors}) == 1, run.errors
    kind, message = run.errors[0]
    assert kind == "ReplicaError" and message is not None
    assert message.startswith(
        f"step {step}: ranks that should hold the same differ since step {agreed}. "
    )
    for word in words:
        assert word in message, message
    assert run.saved == [agreed]


def assert_clean(run: Ended) -> None:
    """It went to its end, and compared something."""
    assert {error[0] for error in run.errors} == {None}, run.errors
    assert run.saved == [2, 4, 5]
    assert "compared at each save" in run.said[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return launch(tmp_path_factory.mktemp("two"), TWO, 2)


@pytest.fixture(scope="module")
def mcore(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return launch(tmp_path_factory.mktemp("mcore"), MCORE_TWO, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return launch(tmp_path_factory.mktemp("four"), FOUR, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part"), [("ddp weight", NORM), ("ddp moment", MOMENT), ("fsdp buffer", BUFFER)]
)
def test_flipped_bit_on_the_hf_engine(two: dict[str, Ended], name: str, part: str) -> None:
    assert_found(two[name], "rank 0 (on ", " against rank 1 (on ", part)


@pytest.mark.slow
def test_what_is_compared_besides_tensors(two: dict[str, Ended]) -> None:
    assert_found(two["ddp seed"], "rank 1 (on ", "dropout's seed less the formula of the rank")
    assert_found(two["ddp learning rate"], "learning rate")
    assert_found(two["ddp position"], "1 part, data position")


@pytest.mark.slow
def test_clean_runs_raise_no_alarm(two: dict[str, Ended]) -> None:
    assert_clean(two["ddp clean"])
    assert_clean(two["fsdp clean"])


@pytest.mark.slow
def test_without_the_comparison_nothing_is_found(two: dict[str, Ended]) -> None:
    """The bit really is flipped: a run of the same data has the same losses until then alone. And
    a run computes the same with the comparison and without it."""
    off, on = two["ddp off"], two["ddp weight"]
    assert off.errors == [[None, None]] * 2 and off.saved == [2, 4, 5]
    assert off.rows[:4] == on.rows
    assert off.rows[:3] == two["ddp position"].rows[:3]
    assert off.rows[3] != two["ddp position"].rows[3]


@pytest.mark.slow
def test_of_three_replicas_the_minority_is_named(tmp_path: Path) -> None:
    (run,) = launch(tmp_path, THREE, 3).values()
    assert_found(run, "rank 1 (on ", " against ranks 0, 2: ", NORM)


@pytest.mark.slow
def test_hsdp_compares_the_copies_of_each_shard(four: dict[str, Ended]) -> None:
    assert_clean(four["hsdp clean"])
    assert_found(four["hsdp moment"], "rank 1 (on ", " against rank 3 (on ", MOMENT)


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize(("name", "part"), [("dp weight", NORM), ("dp moment", MOMENT)])
def test_flipped_bit_under_mcore(mcore: dict[str, Ended], name: str, part: str) -> None:
    assert_found(mcore[name], "rank 0 (on ", " against rank 1 (on ", part)


@pytest.mark.slow
@pytest.mark.megatron
def test_a_norm_that_tp_replicates(mcore: dict[str, Ended]) -> None:
    assert_found(mcore["tp norm"], "rank 0 (on ", " against rank 1 (on ", NORM)
    assert mcore["tp off"].saved == [2, 4, 5]
    assert_clean(mcore["tp clean"])
    assert_clean(mcore["pp clean"])
