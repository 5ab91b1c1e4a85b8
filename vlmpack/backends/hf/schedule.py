"""The optimizer step of one pipeline stage: forward and backward, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from vlmpack.backends.engine import ForwardStep
from vlmpack.packing import Batch


def forward_backward_no_pipelining(
    forward_step: ForwardStep,
    data_iterator: Iterator[Batch],
    model: nn.Module,
    *,
    num_microbatches: int,
    forward_only: bool,
    synchronise: Callable[[bool], AbstractContextManager[object]],
    autocast: Callable[[], AbstractContextManager[object]],
) -> list[dict[str, Tensor]]:
    """Accumulate gradients of the loss sums of `num_microbatches` micro-batches.

    Args:
        forward_step: as in Megatron; see `vlmpack.backends.engine`.
        data_iterator: yields at least `num_microbatches` batches.
        model: what the forward step calls.
        num_microbatches: micro-batches of this rank in this optimizer step; the same on all ranks.
        forward_only: no backward, no graph.
        synchronise: context manager that says whether this micro-batch's backward reduces the
            gradients over the replicas; only the last one does.
        autocast: makes the context that forward runs in; backward runs outside it.

    Returns:
        The sums reported by each micro-batch's loss function.
    """
    reports: list[dict[str, Tensor]] = []
    for index in range(num_microbatches):
        with synchronise(index == num_microbatches - 1), torch.set_grad_enabled(not forward_only):
            with autocast():
                output, loss_function = forward_step(data_iterator, model)
                loss_sum, _, sums = loss_function(output)
            if not forward_only:
                loss_sum.backward()
        reports.append(sums)
    return reports
