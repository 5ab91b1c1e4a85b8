"""Run in ranks: steps with and without communication beside compute.

    torchrun --nproc-per-node N overlapped.py FOLDER EXPERTS CASE [CASE ...]

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
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed import param_and_grad_buffer as buffers
from support import layouts
from support.engines import EVERYTHING, policy
from support.family_layouts import train_pairs
from support.layouts import Layout, make_megatron, one_layout, stepper_with, train
from support.shards import TINY_MODEL
from torch import Tensor

from vlmpack.backends.mcore import stage
from vlmpack.backends.mcore.overlap import OrderedReduction, ParameterGather
from vlmpack.distributed import Ranks, stop_process_group
from vlmpack.errors import VlmpackError
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
