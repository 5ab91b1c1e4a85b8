"""The forward step of a vision-language model, in Megatron's contract.

`forward_step(data_iterator, model)` returns the model's output and a function of that output; an
engine's schedule calls both. Losses are sums with explicit token counts: normalising happens once,
globally, by the objective's divisor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

from torch import Tensor, nn

from vlmpack.backends.engine import LossFunction
from vlmpack.packing import Batch, PackedBatch, move_batch

TokenSums = Callable[[Tensor, Batch], Mapping[str, Tensor]]
"""(L,) float32 losses of the label tokens, and their batch on the same device -> 0-d sums by name;
`loss_sum` is differentiated."""


def cross_entropy(losses: Tensor, batch: Batch) -> Mapping[str, Tensor]:
    """The losses as they are."""
    return {"loss_sum": losses.sum()}


def forward_step(
    data_iterator: Iterator[Batch],
    model: nn.Module,
    sums: TokenSums = cross_entropy,
    scales: Mapping[str, Tensor] = MappingProxyType({}),
    of_rows: bool = False,
) -> tuple[Tensor, LossFunction]:
    """Take one micro-batch, move it to the model's device, and run the model.

    Args:
        data_iterator: yields batches on CPU, pinned where the model is on a GPU.
        model: called as `model(batch, packed_seq_params)`.
        sums: what an objective makes of the losses.
        scales: 0-d factors of those sums that are differentiated beside `loss_sum`.
        of_rows: whether `sums` are of whole rows: the context-parallel ranks that share a row then
            have the same, which the first of them reports.

    Returns:
        (L,) float32 losses of the label tokens, and the function that sums them.
    """
    device = next(model.parameters()).device
    batch = move_batch(next(data_iterator), device)
    losses = model(batch, batch.packed_seq_params())
    return losses, partial(_summed, sums=sums, batch=batch, scales=scales, of_rows=of_rows)


def _summed(
    losses: Tensor, *, sums: TokenSums, batch: Batch, scales: Mapping[str, Tensor], of_rows: bool
) -> tuple[Tensor, int, dict[str, Tensor]]:
    """The term to differentiate, Megatron's count of tokens, and detached float64 sums; none where
    another rank reports the same."""
    found = sums(losses, batch)
    context = batch.context if isinstance(batch, PackedBatch) else None
    report: dict[str, Tensor] = {}
    if context is None or context.rank == 0 or not of_rows:
        report = {name: value.detach().double() for name, value in found.items()}
    whole = found["loss_sum"]
    for name, scale in scales.items():
        whole = whole + scale.to(whole.device, whole.dtype) * found[name]
    return whole, batch.num_label_tokens, report
