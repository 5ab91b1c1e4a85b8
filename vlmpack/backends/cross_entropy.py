"""The language-model head and the cross entropy, on label tokens only and in chunks.

A full (T, vocabulary) float32 tensor never exists: the logits of one chunk are made, reduced to a
loss and dropped; the backward pass makes them again. Costs one more head matmul than keeping them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 25
"""Largest number of float32 logits held at once (128 MiB)."""


def chunk_rows(vocabulary: int) -> int:
    """Label tokens per chunk: as many as CHUNK_ELEMENTS allows, at least 1."""
    return max(1, CHUNK_ELEMENTS // vocabulary)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        losses = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        log_sums = torch.empty_like(losses)
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            logits = (hidden[chunk] @ weight.T).float()
            log_sums[chunk] = logits.logsumexp(dim=-1)
            picked = logits.gather(1, targets[chunk, None]).squeeze(1)
            losses[chunk] = log_sums[chunk] - picked
        ctx.save_for_backward(hidden, weight, targets, log_sums)
        ctx.rows = rows
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, targets, log_sums = ctx.saved_tensors
        grad_losses: Tensor = grads[0]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, hidden.shape[0], ctx.rows):
            chunk = slice(start, start + ctx.rows)
            logits = (hidden[chunk] @ weight.T).float()
            probabilities = logits.sub_(log_sums[chunk, None]).exp_()
            probabilities.scatter_add_(
                1,
                targets[chunk, None],
                probabilities.new_full((probabilities.shape[0], 1), -1.0),
            )
            grad_logits = probabilities.mul_(grad_losses[chunk, None]).to(hidden.dtype)
            grad_hidden[chunk] = grad_logits @ weight
            grad_weight += (grad_logits.T @ hidden[chunk]).float()
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, rows_per_chunk: int | None = None
) -> Tensor:
    """Cross entropy of a bias-free linear head, one loss a label token.

    Args:
        hidden: (L, D) final hidden states of the label tokens; cast to autocast's dtype inside it.
        weight: (V, D) the head.
        targets: (L,) int64, each in [0, V); L may be 0.
        rows_per_chunk: label tokens per chunk; None for `chunk_rows(V)`.

    Returns:
        (L,) float32 losses: -log softmax(hidden @ weight.T)[target].
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):  # cast here: backward runs outside autocast
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    rows = rows_per_chunk if rows_per_chunk is not None else chunk_rows(weight.shape[0])
    losses: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight.to(hidden.dtype), targets, rows
    )
    return losses
