"""Communication that overlaps compute: gradients are reduced during the backward pass, and updated
parameters are gathered during the next forward pass.

    backward, last micro-batch   bucket 0 complete -> reduce; bucket 1 ...
    optimizer step               each rank writes its part of every bucket
    next forward                 last bucket gathered first: tower, embedding, layers, head

Megatron's DDP has the buckets and the collectives. Two things are added, because a wrong order, or
a parameter read too early, raises no error there:

- Reductions start in one order on all ranks, whichever bucket is complete first. A rank that
  replays a captured decoder gets all its gradients at once. A rank that runs it layer by layer gets
  the last layer's first. Collectives that meet in two orders hang, or add up different tensors.
- A part of the model that is about to run waits for all of its parameters. Megatron waits only for
  those of a module whose `forward` is called. It misses the tied head, and the parameters of
  children that a tower reads directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import nn

from vlmpack.errors import VlmpackError
from vlmpack.recipe.schema import ParallelismSection


def overlaps(split: ParallelismSection, device: torch.device) -> bool:
    """Whether communication overlaps compute on a device, by `parallelism.overlap`."""
    return split.overlap if split.overlap is not None else device.type == "cuda"


def overlap_in_words(
    split: ParallelismSection, device: torch.device, *, transformer_engine: bool
) -> str:
    """The overlapped communication, for the log."""
    if not overlaps(split, device):
        return "none"
    parts = ["gradients"] + ["parameters"] * split.distributed_optimizer
    if split.tensor == 1:
        return " and ".join(parts)
    why = "one shape for all rows" if transformer_engine else "Transformer Engine's layers"
    return f"{' and '.join(parts)}; not tensor parallelism's (user buffers need {why})"


class OrderedReduction:
    """Starts the reductions of buckets in one order on all ranks, as soon as each is complete."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        place = {parameter: n for n, (_, parameter) in enumerate(ddp.module.named_parameters())}
        self.names = {parameter: name for name, parameter in ddp.module.named_parameters()}

        def first(group: Any) -> int:
            return min(place[parameter] for parameter in group.params)

        # A bucket is complete once the backward pass reaches its first parameter.
        both = (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups)
        self.groups: list[Any] = sorted(both, key=first, reverse=True)
        self._start: list[Callable[..., None]] = [group.start_grad_sync for group in self.groups]
        for number, group in enumerate(self.groups):
            group.start_grad_sync = partial(self._complete, number)
        self.complete: dict[int, bool] = {}
        self.started = 0

    def _complete(self, number: int, force_all_reduce: bool | None = False) -> None:
        """In the place of the bucket's own start, which gets what was asked of this one."""
        self.complete.setdefault(number, bool(force_all_reduce))
        while self.started in self.complete:
            self._start[self.started](force_all_reduce=self.complete[self.started])
            self.started += 1

    def start_rest(self) -> None:
        """Start the remaining reductions when the backward passes of a step are over.

        These are all reductions of the first step, whose order Megatron learns. Later they are
        buckets with a parameter that no gradient has reached.

        Raises:
            VlmpackError: a bucket got more gradients than in the first step, so its reduction
                started too early.
        """
        for group in self.groups:
            known = group.golden_per_param_grad_ready_counts
            for parameter, times in group.per_param_grad_ready_counts.items():
                if not group.is_first_batch and times > known[parameter]:
                    raise VlmpackError(
                        f"{self.names[parameter]} got {times} gradients in the last micro-batch "
                        f"of a step, in the first step {known[parameter]}. Its sum over processes "
                        "had started. Set parallelism.overlap: false"
                    )
        for number in range(len(self.groups)):
            self._complete(number)

    def reset(self) -> None:
        """Prepare for the next step. Called before DDP's own reset."""
        for group in self.groups:
            counts = group.per_param_grad_ready_counts
            if group.is_first_batch and len(counts) < len(group.params):
                group.per_param_grad_ready_counts = {}  # never complete, so reduced at the end
        self.complete.clear()
        self.started = 0


class ParameterGather:
    """Gathers updated parameters bucket by bucket in forward order, one bucket ahead.

    Args:
        units: modules that wait for their parameters when they are called.
    """

    def __init__(self, ddp: DistributedDataParallel, units: Iterable[nn.Module]) -> None:
        ddp.disable_forward_pre_hook(param_sync=False)
        both = (ddp.bucket_groups, ddp.expert_parallel_bucket_groups)
        self.chains: list[list[Any]] = [list(reversed(groups)) for groups in both if groups]
        self.place = {
            parameter: (chain, number)
            for chain, groups in enumerate(self.chains)
            for number, group in enumerate(groups)
            for parameter in group.params
        }
        self.gathered = [len(groups) for groups in self.chains]
        for unit in units:
            unit.register_forward_pre_hook(self._before)

    def start(self) -> None:
        """Gather the first buckets, after the optimizer wrote this rank's parts."""
        assert not self.pending
        for number, groups in enumerate(self.chains):
            for group in groups:
                group.param_gather_dispatched = False
            self.gathered[number] = 0
            groups[0].start_param_sync()

    @property
    def pending(self) -> bool:
        """Whether some are still to come."""
        return self.gathered != [len(groups) for groups in self.chains]

    def wait(self, module: nn.Module) -> None:
        """Wait for a module's parameters, those of its children too."""
        if not self.pending:
            return
        for parameter in module.parameters():
            if parameter in self.place:
                self._until(*self.place[parameter])

    def finish(self) -> None:
        """Wait for all of them, for readers of parameters outside of the forward pass."""
        for chain, groups in enumerate(self.chains):
            self._until(chain, len(groups) - 1)

    def _before(self, module: nn.Module, _: Any) -> None:
        self.wait(module)

    def _until(self, chain: int, number: int) -> None:
        while self.gathered[chain] <= number:
            # Megatron starts the next one.
            self.chains[chain][self.gathered[chain]].finish_param_sync()
            self.gathered[chain] += 1
