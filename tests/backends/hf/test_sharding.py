"""Four processes (gloo) take the steps of one, in every form that shares the model's memory out."""

from __future__ import annotations

import json

import pytest
from support import replicas, sharded_forms
from support.engines import make_engine, make_stepper, single_rank
from support.forked import check_ranks
from support.shards import TINY_MODEL

from vlmpack.training.checkpoint import load_checkpoint, step_folder

pytestmark = pytest.mark.soak
ONE_ROW = [[[0, 1, 2, 3, 4, 5]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forms")
    check_ranks([sharded_forms.__file__, folder], 4)
    found = {
        name: json.loads((folder / f"{name}.json").read_text()) for name in sharded_forms.FORMS
    }
    return folder, found


@pytest.fixture(scope="module")
def expected(encoder, encoded):
    stepper = make_stepper(make_engine(TINY_MODEL, encoder))
    return replicas.train(stepper, ONE_ROW, encoded, count=sharded_forms.STEPS + 2)


@pytest.mark.parametrize("form", sharded_forms.FORMS)
def test_steps_are_those_of_one_process(results, expected, form):
    rows = results[1][form]["rows"]
    assert rows[0] != rows[-1], "nothing was learned"
    for ours, theirs in zip(rows, expected[: sharded_forms.STEPS], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_gradients_lie_once_under_ddp_and_are_the_same_bit_for_bit(results):
    once, twice = results[1]["ddp"], results[1]["ddp, gradients twice"]
    assert once["rows"] == twice["rows"]
    assert twice["storages"] == twice["gradients"] > 10, "the control has a storage for each"
    assert once["storages"] < once["gradients"] / 10, "they are views of a few buckets"


def test_gradients_are_sharded_behind_each_micro_batch_where_asked(results):
    _, found = results
    for form in ("fsdp", "hsdp"):
        assert found[form]["between"] == found[form]["parameters"] > 0
        assert found[f"{form}, each"]["between"] == 0


def test_one_fused_kernel_updates_shards_too(results):
    assert all(result["fused"] for result in results[1].values())


def test_hsdp_has_copies_whose_shards_are_written_once(results, encoder, encoded, expected):
    folder, found = results
    assert found["hsdp"]["processes"] == "4 (HSDP: 2 copies over 2)"
    for form, result in found.items():
        assert sum(result["owned"]) == result["parameters"], form
        assert min(result["owned"]) > 0.8 * max(result["owned"]), form
    for form in sharded_forms.RESUMED:  # into the other form, and into one process
        for ours, theirs in zip(found[form]["resumed"], found[form]["next"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
        one = make_stepper(make_engine(TINY_MODEL, encoder))
        saved = step_folder(folder / form, sharded_forms.STEPS)
        load_checkpoint(saved, one.engine, single_rank())
        rows = replicas.train(one, ONE_ROW, encoded, start=sharded_forms.STEPS, count=2)
        for ours, theirs in zip(rows, expected[sharded_forms.STEPS :], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
