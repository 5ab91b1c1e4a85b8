"""Gradients that are reduced beside the backward pass, and parameters that are gathered beside the
forward pass, are those of a step that waits for each: bit for bit on two replicas, where a sum has
two terms.

Collectives end when they may: gathers as late as possible, with no numbers in what is not there
yet; reductions at once, so a gradient that comes later is missed. Both ways to be wrong are found.
"""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from support import overlapped as worker
from support.families import tiny_family_folder
from support.forked import check_ranks

from vlmpack.backends.mcore.overlap import OrderedReduction, overlap_in_words, overlaps
from vlmpack.errors import VlmpackError
from vlmpack.recipe.schema import ParallelismSection

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
slow = pytest.mark.slow
SOAK = {"replicated", "adapters", "experts", "pairs", "captured", "cp2-pp2", "tp2-dp2"}
CASES = [pytest.param(n, marks=pytest.mark.soak if n in SOAK else slow) for n in worker.CASES]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What each rank saw, by case and mode."""
    folder = tmp_path_factory.mktemp("overlap")
    experts = tiny_family_folder("qwen3_vl_moe", tmp_path_factory.mktemp("experts"))

    @cache
    def launch(processes, soak):
        names = [
            name
            for name, (layout, _) in worker.CASES.items()
            if layout.processes == processes and (name in SOAK) == soak
        ]
        check_ranks([worker.__file__, folder, experts, *names], processes)

    def seen(name, mode):
        processes = worker.CASES[name][0].processes
        launch(processes, name in SOAK)
        texts = ((folder / f"{name}-{mode}-{r}.json").read_text() for r in range(processes))
        return [json.loads(text) for text in texts]

    return seen


@pytest.mark.parametrize("name", CASES)
def test_steps_are_bit_for_bit_those_without_overlap(launched, name):
    expected = launched(name, "off")
    assert all(rank["said"] == "none" and not rank["early"] for rank in expected)
    assert any(rank["norms"] for rank in expected)
    modes = worker.CASES[name][1].get("modes", worker.MODES)
    for mode in {*modes} - {"off", *worker.CONTROLS}:
        for found, rank in zip(launched(name, mode), expected, strict=True):
            assert (found["losses"], found["weights"]) == (rank["losses"], rank["weights"]), mode
            assert found["norms"] == pytest.approx(rank["norms"], rel=1e-5)  # by other shares
            assert found["settled"]


@pytest.mark.parametrize("name", CASES)
def test_reductions_start_before_the_backward_pass_is_over(launched, name):
    """From the second step on; and gathers are on their way after a step. Later stages have one
    bucket in any case."""
    seen = launched(name, "worst")
    first, *later = seen[0]["early"]
    assert seen[0]["buckets"] >= 2
    assert first == 0 and later and all(early >= 2 for early in later)
    assert seen[0]["unsettled"] == worker.CASES[name][0].distributed


@pytest.mark.soak
@pytest.mark.parametrize("mode", worker.MODES)
def test_tensor_parallel_ranks_sum_their_shares_of_the_towers_gradients(launched, mode):
    """Shares of two replicas make up the tower, but for what pads buckets."""
    ranks = launched("tp2-dp2", mode)
    whole = ranks[0]["whole tower"]
    first, same, second, other = (rank["tower"] for rank in ranks)
    assert (first, second) == (same, other)
    assert whole <= first + second < 1.05 * whole
    assert all(rank["tower"] == 0 for rank in launched("cp2-pp2", mode))


@slow
def test_a_parameter_that_is_read_too_early_is_found(launched):
    found = launched("dp2", "no wait")[0]
    assert "error" in found or found["losses"] != launched("dp2", "off")[0]["losses"]


@slow
def test_a_gradient_that_comes_after_its_reduction_is_found(launched):
    found = launched("dp2", "each micro-batch")[0]
    assert "set parallelism.overlap: false" in found["error"]


@pytest.mark.soak
def test_ranks_whose_buckets_are_complete_in_other_orders_start_them_in_one(launched):
    """One replays a recording, which has all gradients at once; the equality above needs the
    order."""
    orders = [rank["order"] for rank in launched("captured", "worst")]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def group(*parameters, known=1):
    """A bucket that writes down its start."""
    made = SimpleNamespace(
        params=set(parameters),
        golden_per_param_grad_ready_counts=dict.fromkeys(parameters, known),
        per_param_grad_ready_counts={},
        is_first_batch=False,
    )
    made.started = []
    made.forced = []

    def start(force_all_reduce=False):
        made.started.append(True)
        made.forced.append(force_all_reduce)

    made.start_grad_sync = start
    return made


def ordered(*groups):
    module = torch.nn.Module()
    for number, parameter in enumerate(p for each in groups for p in each.params):
        module.register_parameter(f"p{number}", parameter)
    ddp = SimpleNamespace(
        module=module, bucket_groups=list(groups), expert_parallel_bucket_groups=[]
    )
    return OrderedReduction(ddp)


def test_a_bucket_waits_for_those_behind_it_in_the_model():
    early, late = (group(torch.nn.Parameter(torch.zeros(1))) for _ in range(2))
    reduction = ordered(early, late)
    early.start_grad_sync()
    assert (early.started, late.started) == ([], [])
    late.start_grad_sync()
    assert (early.started, late.started) == ([True], [True])
    reduction.reset()
    reduction.start_rest()
    assert (early.started, late.started) == ([True] * 2, [True] * 2)
    reduction.start_rest()
    assert len(late.started) == 2


def test_a_bucket_is_reduced_as_megatron_asked_for_it_however_long_it_waits():
    early, late = (group(torch.nn.Parameter(torch.zeros(1))) for _ in range(2))
    reduction = ordered(early, late)
    early.start_grad_sync(force_all_reduce=True)
    late.start_grad_sync()
    assert (early.forced, late.forced) == ([True], [False])
    reduction.reset()
    early.start_grad_sync()
    late.start_grad_sync(True)
    reduction.start_rest()
    assert (early.forced, late.forced) == ([True, False], [False, True])


def test_a_gradient_more_than_in_the_first_step_is_an_error():
    parameter = torch.nn.Parameter(torch.zeros(1))
    one = group(parameter)
    reduction = ordered(one)
    one.per_param_grad_ready_counts = {parameter: 1}
    reduction.start_rest()
    reduction.reset()
    one.per_param_grad_ready_counts = {parameter: 2}
    with pytest.raises(VlmpackError, match=r"p0 got 2 gradients .* in the first step 1.*overlap"):
        reduction.start_rest()


def test_a_bucket_with_a_parameter_that_nothing_reaches_stays_for_the_end():
    reached, unused = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    one = group(reached, unused)
    one.is_first_batch, one.golden_per_param_grad_ready_counts = True, {}
    reduction = ordered(one)
    one.per_param_grad_ready_counts = {reached: 1}
    reduction.reset()
    assert one.per_param_grad_ready_counts == {}  # Megatron's own reset asserts otherwise
    reduction.start_rest()
    assert one.started == [True]


def test_overlap_is_on_where_there_is_something_to_overlap_with():
    left_out = ParallelismSection()
    assert overlaps(left_out, CUDA) and not overlaps(left_out, CPU)
    for said in (True, False):
        chosen = ParallelismSection(overlap=said)
        assert overlaps(chosen, CUDA) == overlaps(chosen, CPU) == said


def test_what_is_overlapped_is_said_by_name():
    on, tp = {"transformer_engine": False}, ParallelismSection(tensor=2)
    assert overlap_in_words(ParallelismSection(), CPU, **on) == "none"
    assert overlap_in_words(ParallelismSection(), CUDA, **on) == "gradients and parameters"
    whole = ParallelismSection(distributed_optimizer=False)
    assert overlap_in_words(whole, CUDA, **on) == "gradients"
    assert "user buffers need Transformer Engine's layers" in overlap_in_words(tp, CUDA, **on)
    assert "one shape for all rows" in overlap_in_words(tp, CUDA, transformer_engine=True)
