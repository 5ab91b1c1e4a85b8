"""Gradients that are reduced beside the backward pass, and parameters that are gathered beside the
forward pass, are those of a step that waits for each: bit for bit on two replicas, where a sum has
two terms.

Collectives end when they may: gathers as late as possible, with no numbers in what is not there
yet; reductions at once, so a gradient that comes later is missed. Both ways to be wrong are found.

Run in ranks: steps with and without communication beside compute.

    torchrun --nproc-per-node N test_overlap.py FOLDER EXPERTS CASE [CASE ...]

FOLDER/<case>-<mode>-<rank>.json has what a rank saw: losses, whole weights as digests, how many
buckets there were and how many were on their way when the backward pass was over.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from backends.mcore.family_layouts import train_pairs
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed import param_and_grad_buffer as buffers
from support import layouts
from support.engines import EVERYTHING, policy
from support.families import tiny_family_folder
from support.forked import check_ranks
from support.layouts import Layout, make_megatron, one_layout, stepper_with, train
from support.shards import TINY_MODEL
from torch import Tensor

from vlmpack.backends.mcore import stage
from vlmpack.backends.mcore.overlap import (
    OrderedReduction,
    ParameterGather,
    overlap_in_words,
    overlaps,
)
from vlmpack.distributed import Ranks, stop_process_group
from vlmpack.errors import VlmpackError
from vlmpack.recipe.schema import ParallelismSection
from vlmpack.training.objective import forward_step

BUCKET = 30_000
"""Elements, so that the tiny models have several buckets."""

MODES = ("off", "worst")
CONTROLS = ("no wait", "each micro-batch")
SHARDED = {"dp": 2, "distributed": True}
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "dp2": (Layout(**SHARDED), {"modes": (*MODES, "on", *CONTROLS)}),
    "replicated": (Layout(dp=2), {}),
    "experts": (Layout(expert=2, **SHARDED), {"experts": True}),
    "adapters": (Layout(**SHARDED), {"policy": policy("frozen", "frozen", "lora")}),
    "pairs": (Layout(context=2, distributed=True, recompute="full"), {"pairs": True}),
    "captured": (Layout(fixed=True, captured=True, **SHARDED), {"captured": True}),
    "cp2-pp2": (Layout(context=2, pipeline=2, distributed=True), {"modes": (*MODES, "on")}),
    "tp2-dp2": (Layout(tensor=2, sequence=True, **SHARDED), {}),
}
"""By name: a layout, and what else is particular."""


class Done:
    """A collective that is over."""

    def wait(self) -> None:
        return None


class Later:
    """A gather that is done when it is waited for; until then the others' shares are no numbers."""

    def __init__(self, group: Any) -> None:
        self.ranks = group.intra_distributed_optimizer_instance_group
        self.buckets = [bucket.param_data for bucket in group.buckets]
        for whole in self.buckets:
            mine = self._share(whole).clone()
            whole.fill_(float("nan"))
            self._share(whole).copy_(mine)

    def _share(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.ranks.size())[self.ranks.rank()]

    def wait(self) -> None:
        for whole in self.buckets:
            dist.all_gather_into_tensor(whole, self._share(whole).clone(), group=self.ranks)


def gather_later(group: Any, force_sync: bool = False) -> None:
    """In the place of a bucket's own start."""
    assert not force_sync and group.param_gather_handle is None
    group.param_gather_handle, group.param_gather_dispatched = Later(group), True


_start = buffers._ParamAndGradBucketGroup.start_grad_sync


def reduce_at_once(group: Any, force_all_reduce: bool = False) -> None:
    """A reduction is over as soon as it has started, so a gradient that comes later is not in."""
    if group.grad_reduce_handle is None:
        _start(group)
        group.grad_reduce_handle.wait()
        group.grad_reduce_handle = Done()


@contextmanager
def worst_times() -> Iterator[None]:
    """Gathers end as late as they may, reductions as early."""
    group = buffers._ParamAndGradBucketGroup
    with (
        patch.object(group, "start_param_sync", gather_later),
        patch.object(group, "start_grad_sync", reduce_at_once),
    ):
        yield


class Seen:
    """What happened on this rank."""

    def __init__(self) -> None:
        self.early: list[int] = []
        self.order: list[int] = []
        self.pending = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Counts reductions that have started before the backward pass was over, and the order in
        which buckets were complete."""
        rest, complete = OrderedReduction.start_rest, OrderedReduction._complete

        def start_rest(of: OrderedReduction) -> None:
            self.early.append(of.started)
            rest(of)

        def completed(of: OrderedReduction, number: int, *also: Any, **named: Any) -> None:
            self.order.append(number)
            complete(of, number, *also, **named)

        with (
            patch.object(OrderedReduction, "start_rest", start_rest),
            patch.object(OrderedReduction, "_complete", completed),
        ):
            yield


def never_off(engine: Any) -> None:
    """Each micro-batch counts as the last of its step."""
    engine.model.config.no_sync_func = nullcontext


def run(name: str, mode: str, ranks: Ranks, folder: Path, experts: Path) -> None:
    """One case in one mode."""
    layout, options = CASES[name]
    layout = replace(layout, overlap=mode != "off")
    model = experts if "experts" in options else TINY_MODEL
    seen = Seen()
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        config = partial(DistributedDataParallelConfig, bucket_size=BUCKET)
        stack.enter_context(patch.object(stage, "DistributedDataParallelConfig", config))
        stack.enter_context(seen.watching())
        if mode not in ("off", "on"):
            stack.enter_context(worst_times())
        if mode == "no wait":
            stack.enter_context(patch.object(ParameterGather, "wait", lambda *_: None))
        engine = make_megatron(layout, ranks, model, policy=options.get("policy", EVERYTHING))
        if "captured" in options and ranks.rank == 1:
            engine.model.graph.takes = lambda batch: False  # as a row that is too full
        try:
            found = _steps(engine, layout, options, mode, model)
        except VlmpackError as error:
            found["error"] = str(error)
    ddp = engine.ddp
    found |= {
        "buckets": len(ddp.bucket_groups) + len(ddp.expert_parallel_bucket_groups),
        "early": seen.early,
        "tower": sum(part.numel() for part in (*engine.stage.over_tp, *engine.stage.small_over_tp)),
        "whole tower": sum(p.numel() for p in engine.model.vision.parameters())
        if engine.model.vision is not None
        else 0,
        "order": seen.order,
        "said": engine.description["overlap"],
    }
    (folder / f"{name}-{mode}-{ranks.rank}.json").write_text(json.dumps(found))
    dist.barrier()


def _steps(
    engine: Any, layout: Layout, options: dict[str, Any], mode: str, model: Path
) -> dict[str, Any]:
    """Losses and weights of some steps, with a pass without gradients in between."""
    if "pairs" in options:
        rows = train_pairs(engine, layout, model)
    else:
        stepper = stepper_with(engine, "sgd")  # a norm that clips is summed by shares
        rows = train(stepper, layout, 1, model)
        if mode == "each micro-batch":
            never_off(engine)
        samples = layouts.samples(model)
        batch = layouts.collator(layout, samples[0].position_ids.shape[0])(samples[:2])
        reports = engine.forward_backward(
            forward_step, iter([batch]), num_microbatches=1, forward_only=True
        )
        rows += [[float(report["loss_sum"])] for report in reports if report]
        rows += train(stepper, layout, 1, model)
    unsettled = any(p.isnan().any() for p in engine.model.parameters())
    digest = hashlib.sha256()
    for tensor_name, tensor in engine.whole_tensors():
        digest.update(tensor_name.encode() + tensor.numpy().tobytes())
    settled = not any(p.isnan().any() for p in engine.model.parameters())
    return {
        "losses": [row[0] for row in rows],
        "norms": [row[1] for row in rows if len(row) > 1],
        "weights": digest.hexdigest(),
        "unsettled": unsettled,
        "settled": settled,
    }


def main(folder: Path, experts: Path, names: list[str]) -> None:
    """Every case in its modes."""
    for name in names:
        with one_layout(CASES[name][0]) as ranks:
            for mode in CASES[name][1].get("modes", MODES):
                run(name, mode, ranks, folder, experts)
    stop_process_group()


CUDA, CPU = torch.device("cuda"), torch.device("cpu")
slow = pytest.mark.slow
SOAK = {"replicated", "adapters", "experts", "pairs", "captured", "cp2-pp2", "tp2-dp2"}
NAMES = [pytest.param(n, marks=pytest.mark.soak if n in SOAK else slow) for n in CASES]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What each rank saw, by case and mode."""
    folder = tmp_path_factory.mktemp("overlap")
    experts = tiny_family_folder("qwen3_vl_moe", tmp_path_factory.mktemp("experts"))

    @cache
    def launch(processes, soak):
        names = [
            name
            for name, (layout, _) in CASES.items()
            if layout.processes == processes and (name in SOAK) == soak
        ]
        check_ranks([__file__, folder, experts, *names], processes)

    def seen(name, mode):
        processes = CASES[name][0].processes
        launch(processes, name in SOAK)
        texts = ((folder / f"{name}-{mode}-{r}.json").read_text() for r in range(processes))
        return [json.loads(text) for text in texts]

    return seen


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_bit_for_bit_those_without_overlap(launched, name):
    expected = launched(name, "off")
    assert all(rank["said"] == "none" and not rank["early"] for rank in expected)
    assert any(rank["norms"] for rank in expected)
    modes = CASES[name][1].get("modes", MODES)
    for mode in {*modes} - {"off", *CONTROLS}:
        for found, rank in zip(launched(name, mode), expected, strict=True):
            assert (found["losses"], found["weights"]) == (rank["losses"], rank["weights"]), mode
            assert found["norms"] == pytest.approx(rank["norms"], rel=1e-5)  # by other shares
            assert found["settled"]


@pytest.mark.parametrize("name", NAMES)
def test_reductions_start_before_the_backward_pass_is_over(launched, name):
    """From the second step on; and gathers are on their way after a step. Later stages have one
    bucket in any case."""
    seen = launched(name, "worst")
    first, *later = seen[0]["early"]
    assert seen[0]["buckets"] >= 2
    assert first == 0 and later and all(early >= 2 for early in later)
    assert seen[0]["unsettled"] == CASES[name][0].distributed


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
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
    assert "Set parallelism.overlap: false" in found["error"]


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


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
