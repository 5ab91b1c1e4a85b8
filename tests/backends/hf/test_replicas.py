"""Two replicas (gloo) take the steps that one process takes, for any deal."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from backends.hf import replicas
from safetensors.torch import load_file
from support.checkpoints import save_engine, stored_tensors
from support.engines import make_engine, make_stepper, single_rank
from support.forked import check_ranks
from support.runs import relative_l2
from support.shards import TINY_MODEL

from vlmpack.training.checkpoint import find_damage, list_checkpoints, step_folder

pytestmark = pytest.mark.slow

STEP_TOLERANCE = 1e-5
"""Relative, loss and gradient norm: the stated bound of the project."""
UPDATE_TOLERANCE = 1e-3
"""Relative L2 of what five AdamW steps changed. The first steps are nearly sign(gradient), so a
gradient element that is rounding noise may move the other way."""
IN_CI = ("one each", "image-less rank, empty bin")
ONE_ROW = [[[0, 1, 2, 3, 4, 5]]]
SOAK = ("three uneven", "empty rank", "image-less rank", "empty bin")
"""The last two are together in one of the others."""


def in_two_processes(folder, deals):
    """All scenarios of backends/hf/replicas.py."""
    check_ranks([replicas.__file__, folder, ";".join(deals)], 2)
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory, one_process_checkpoint):
    folder = tmp_path_factory.mktemp("replicas")
    (folder / "one").symlink_to(one_process_checkpoint[0])
    return in_two_processes(folder, IN_CI)


@pytest.fixture(scope="module")
def soak_results(tmp_path_factory):
    return in_two_processes(tmp_path_factory.mktemp("replicas-soak"), SOAK)


@pytest.fixture(scope="module")
def one_process(tiny_folder, encoder, encoded):
    """Rows of the same global batch as one row in this process, and what the steps changed."""
    stepper = make_stepper(make_engine(tiny_folder, encoder))
    before = replicas.whole_weights(stepper)
    rows = replicas.train(stepper, ONE_ROW, encoded)
    return rows, before, replicas.whole_weights(stepper)


@pytest.fixture(scope="module")
def one_process_checkpoint(tiny_folder, encoder, encoded, tmp_path_factory):
    """A checkpoint of one process after the steps, and the steps that follow."""
    stepper = make_stepper(make_engine(tiny_folder, encoder))
    replicas.train(stepper, ONE_ROW, encoded)
    root = tmp_path_factory.mktemp("one")
    save_engine(root, replicas.STEPS, stepper.engine, keep=1)
    return root, replicas.train_on(stepper, ONE_ROW, encoded)


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


@pytest.mark.parametrize("deal", IN_CI)
@pytest.mark.parametrize(("sharding", "processes"), [("none", "2 (DDP)"), ("fsdp", "2 (FSDP2)")])
def test_two_replicas_take_the_steps_of_one_process(
    results, one_process, sharding, processes, deal
):
    assert_same_steps(results, sharding, deal, one_process, processes)


@pytest.mark.soak
@pytest.mark.parametrize("deal", SOAK)
@pytest.mark.parametrize(("sharding", "processes"), [("none", "2 (DDP)"), ("fsdp", "2 (FSDP2)")])
def test_two_replicas_take_the_steps_of_one_process_for_more_deals(
    soak_results, one_process, sharding, processes, deal
):
    assert_same_steps(soak_results, sharding, deal, one_process, processes)


def test_the_deals_are_what_they_say(mixed):
    assert {*IN_CI, *SOAK} == replicas.DEALS.keys()
    texts = {index for index, sample in enumerate(mixed) if not sample.images}
    for name in ("image-less rank, empty bin", "image-less rank"):
        assert {index for bin_ in replicas.DEALS[name][1] for index in bin_} == texts
    for name in ("image-less rank, empty bin", "empty bin"):
        assert [] in replicas.DEALS[name][1]
    for name, deal in replicas.DEALS.items():
        assert sorted(i for rank in deal for bin_ in rank for i in bin_) == list(range(6)), name
        assert len({len(rank) for rank in deal}) == 1, "the same number of micro-batches"


SHARDINGS = [("none", "Parameter"), ("fsdp", "DTensor")]


def round_trip(results, sharding):
    return json.loads((results / f"round-trip-{sharding}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("sharding", "kind"), SHARDINGS)
def test_weights_and_moments_make_the_round_trip(results, sharding, kind):
    result = round_trip(results, sharding)
    assert result["type"] == kind
    assert len(result["steps"]) == replicas.STEPS_AFTER
    assert result["steps"] == result["steps_again"], "a resumed run takes other steps"
    first, again = (
        step_folder(results / name, replicas.STEPS) for name in (sharding, f"{sharding}-again")
    )
    assert find_damage(first) is None
    mine, theirs = stored_tensors(first), stored_tensors(again)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(("sharding", "kind"), SHARDINGS)
def test_both_ranks_write_every_element_once_between_them(results, session_engine, sharding, kind):
    stored = stored_tensors(step_folder(results / sharding, replicas.STEPS))  # the cover
    shapes = session_engine.parameter_shapes()
    expected = {
        f"{k}.{n}": shape for k in ("model", "exp_avg", "exp_avg_sq") for n, shape in shapes.items()
    }
    assert {name: tuple(value.shape) for name, value in stored.items()} == expected
    written = [
        sum(math.prod(box) for box in boxes) for boxes in round_trip(results, sharding)["owned"]
    ]
    assert sum(written) == sum(math.prod(shape) for shape in expected.values())
    assert max(written) <= 1.1 * min(written), "one rank writes much more than the other"


@pytest.mark.parametrize(("sharding", "kind"), SHARDINGS)
def test_one_process_goes_on_from_two_and_two_from_one(
    results, one_process_checkpoint, encoder, encoded, sharding, kind
):
    result = round_trip(results, sharding)
    one = replicas.resumed("none", step_folder(results / sharding, replicas.STEPS), single_rank())
    for ours, theirs in (
        (replicas.train_on(one, ONE_ROW, encoded), result["steps"]),
        (result["steps_from_one"], one_process_checkpoint[1]),
    ):
        assert len(ours) == len(theirs) == replicas.STEPS_AFTER
        for mine, expected in zip(ours, theirs, strict=True):
            assert mine == pytest.approx(expected, rel=STEP_TOLERANCE)
    losses = [loss for loss, _ in result["steps"]]
    assert losses == sorted(losses, reverse=True), "what is compared does not change"


def test_a_rank_that_cannot_write_fails_the_save_on_all_and_keeps_the_older_one(results):
    messages = {
        json.loads((results / f"failed-save-{rank}.json").read_text(encoding="utf-8"))
        for rank in range(2)
    }
    assert len(messages) == 1
    message = messages.pop()
    assert message.startswith("checkpoint of step 2 cannot be written: rank 1 on ")
    assert "No space left" in message
    assert [path.name for path in (results / "failed").iterdir()] == ["step-00000001"]
    assert find_damage(list_checkpoints(results / "failed")[0]) is None


def test_a_bad_sample_on_one_rank_stops_all_ranks_alike(results, encoded):
    messages = [
        json.loads((results / f"non-finite-{rank}.json").read_text(encoding="utf-8"))
        for rank in range(2)
    ]
    assert messages[0] == messages[1]
    assert "run again in place, is not finite either" in messages[0]
    assert encoded[3].key in messages[0]
    assert encoded[0].key not in messages[0]


@pytest.mark.cases(slow="four")
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
    before = torch.distributed.is_initialized()  # by tests of the same process
    runpy.run_path(replicas.__file__)
    assert torch.distributed.is_initialized() == before
