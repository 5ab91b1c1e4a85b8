"""The forward step of a vision-language model, in Megatron's contract.

`forward_step(data_iterator, model)` returns the model's output and a function of that output; an
engine's schedule calls both. Losses are sums with explicit token counts: normalising happens once,
globally, in the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor, nn

from vlmpack.backends.engine import LossFunction
from vlmpack.packing import Batch, move_batch


def loss_sum(losses: Tensor, *, num_label_tokens: int) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Sum of per-token losses.

    Args:
        losses: (L,) float32, one a label token.
        num_label_tokens: L.

    Returns:
        The sum to differentiate, L, and the detached sum in float64 for the report.
    """
    total = losses.sum()
    return total, num_label_tokens, {"loss_sum": total.detach().double()}


def forward_step(data_iterator: Iterator[Batch], model: nn.Module) -> tuple[Tensor, LossFunction]:
    """Take one micro-batch, move it to the model's device, and run the model.

    Args:
        data_iterator: yields batches on CPU, pinned where the model is on a GPU.
        model: called as `model(batch, packed_seq_params)`.

    Returns:
        (L,) float32 losses of the label tokens, and the function that sums them.
    """
    device = next(model.parameters()).device
    batch = move_batch(next(data_iterator), device)
    losses = model(batch, batch.packed_seq_params())
    return losses, partial(loss_sum, num_label_tokens=batch.num_label_tokens)
