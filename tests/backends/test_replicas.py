"""Two replicas under torchrun (gloo) take the steps that one process takes, for any deal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import replicas
from support.engines import make_engine, make_stepper
from support.runs import relative_l2
from support.shards import TINY_MODEL

from vlmpack.training.weights import gather_weights

TESTS = Path(__file__).resolve().parents[1]
STEP_TOLERANCE = 1e-5
"""Relative, loss and gradient norm: the stated bound of the project."""
UPDATE_TOLERANCE = 1e-3
"""Relative L2 of what five AdamW steps changed. The first steps are nearly sign(gradient), so a
gradient element that is rounding noise may move the other way."""
QUICK = ("one each", "image-less rank, empty bin")
SLOW = tuple(name for name in replicas.DEALS if name not in QUICK)


def torchrun(folder, deals):
    """All scenarios of support/replicas.py in two processes."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(str(TESTS / "support" / "replicas.py"), str(folder), ";".join(deals)),
        ],
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent))),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def quick_results(tmp_path_factory):
    return torchrun(tmp_path_factory.mktemp("replicas"), QUICK)


@pytest.fixture(scope="module")
def slow_results(tmp_path_factory):
    return torchrun(tmp_path_factory.mktemp("replicas-slow"), SLOW)


@pytest.fixture(scope="module")
def one_process(tiny_folder, encoder, encoded):
    """Rows of the same global batch as one row in this process, and what the steps changed."""
    stepper = make_stepper(make_engine(tiny_folder, encoder))
    before, _ = gather_weights(stepper)
    rows = replicas.train(stepper, [[[0, 1, 2, 3, 4, 5]]], encoded)
    after, _ = gather_weights(stepper)
    return rows, before, after


def assert_same_steps(folder, sharding, deal, one_process, processes):
    rows, before, after = one_process
    result = json.loads((folder / f"{sharding}-{deal}.json").read_text(encoding="utf-8"))
    assert processes in result["processes"]
    assert len(rows) == replicas.STEPS
    assert rows[0] != rows[-1], "nothing was learned"
    worst = max(
        abs(mine - theirs) / theirs
        for ours, expected in zip(result["rows"], rows, strict=True)
        for mine, theirs in zip(ours, expected, strict=True)
    )
    theirs = load_file(str(folder / f"{sharding}-{deal}.safetensors"))
    assert theirs.keys() == after.keys()
    updates = {n: relative_l2(theirs[n] - before[n], after[n] - before[n]) for n in after}
    print(f"\n{sharding}, {deal}: steps {worst:.1e}, updates {max(updates.values()):.1e}")
    assert worst <= STEP_TOLERANCE
    assert max(updates.values()) <= UPDATE_TOLERANCE


@pytest.mark.parametrize("deal", QUICK)
@pytest.mark.parametrize(("sharding", "processes"), [("none", "2 (DDP)"), ("fsdp", "2 (FSDP2)")])
def test_two_replicas_take_the_steps_of_one_process(
    quick_results, one_process, sharding, processes, deal
):
    assert_same_steps(quick_results, sharding, deal, one_process, processes)


@pytest.mark.slow
@pytest.mark.parametrize("deal", SLOW)
@pytest.mark.parametrize(("sharding", "processes"), [("none", "2 (DDP)"), ("fsdp", "2 (FSDP2)")])
def test_two_replicas_take_the_steps_of_one_process_for_every_deal(
    slow_results, one_process, sharding, processes, deal
):
    assert_same_steps(slow_results, sharding, deal, one_process, processes)


def test_the_deals_are_what_they_say(mixed):
    texts = {index for index, sample in enumerate(mixed) if not sample.images}
    for name in ("image-less rank, empty bin", "image-less rank"):
        assert {index for bin_ in replicas.DEALS[name][1] for index in bin_} == texts
    for name in ("image-less rank, empty bin", "empty bin"):
        assert [] in replicas.DEALS[name][1]
    for name, deal in replicas.DEALS.items():
        assert sorted(i for rank in deal for bin_ in rank for i in bin_) == list(range(6)), name
        assert len({len(rank) for rank in deal}) == 1, "the same number of micro-batches"


def test_sharded_weights_and_moments_make_the_round_trip(quick_results):
    result = json.loads((quick_results / "round-trip.json").read_text(encoding="utf-8"))
    assert result["sharded"] == "DTensor"
    assert result["parameters"] == result["equal"] > 50
    assert result["moments"] == result["moments_equal"] == 3 * result["parameters"]
    first, again = result["steps"]
    assert first == again, "a resumed sharded run takes another step"


def test_a_bad_sample_on_one_rank_stops_all_ranks_alike(quick_results, encoded):
    messages = [
        json.loads((quick_results / f"non-finite-{rank}.json").read_text(encoding="utf-8"))
        for rank in range(2)
    ]
    assert messages[0] == messages[1]
    assert "stopped before the optimizer step" in messages[0]
    assert encoded[3].key in messages[0]
    assert encoded[0].key not in messages[0]


@pytest.mark.parametrize(
    "deal",
    [
        [[[5, 0, 3], [1, 4], [2], []]],
        pytest.param([[[0], [1], [2], [3], [4], [5]]], marks=pytest.mark.slow),
    ],
    ids=["four", "six"],
)
def test_one_process_may_split_its_global_batch_in_any_way(encoder, encoded, one_process, deal):
    rows, _, _ = one_process
    stepper = make_stepper(make_engine(TINY_MODEL, encoder))
    for ours, theirs in zip(replicas.train(stepper, deal, encoded), rows, strict=True):
        assert ours == pytest.approx(theirs, rel=STEP_TOLERANCE)


def test_the_replica_script_is_not_run_by_accident():
    assert "torch.distributed.run" not in Path(replicas.__file__).read_text(encoding="utf-8")
    assert not torch.distributed.is_initialized()
