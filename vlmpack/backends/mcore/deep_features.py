"""DeepStack in Megatron's decoder: image features added to the output of the first layers.

The features of all layers come out of one call of the vision tower, while layers may run inside
Megatron's recomputation, which goes through their part of the graph on its own. So layers add
leaves, and a gate at the decoder's entrance, whose backward pass runs last, hands the leaves'
gradients on to the tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class _Gate(torch.autograd.Function):
    """hidden -> hidden; backward hands out what the leaves have gathered."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, leaves: tuple[Tensor, ...], *features: Tensor) -> Tensor:
        ctx.leaves = leaves
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return grads[0], None, *(leaf.grad for leaf in ctx.leaves)


def enter(hidden: Tensor, features: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What the decoder is to be called with.

    Args:
        hidden: (T', 1, D).
        features: (T', 1, D) each, one for each of the first layers.

    Returns:
        The decoder's input, and the leaves that its layers add.
    """
    if not features:
        return hidden, ()
    leaves = tuple(feature.detach().requires_grad_() for feature in features)
    gated: Tensor = _Gate.apply(hidden, leaves, *features)  # type: ignore[no-untyped-call]
    return gated, leaves


def add_after(layers: Sequence[nn.Module]) -> None:
    """Let each layer add its leaf, which travels with the row's params: with pipeline stages
    several micro-batches are under way at a time."""
    for number, layer in enumerate(layers):
        layer.register_forward_hook(partial(_add, number), with_kwargs=True)


def _add(
    number: int, module: nn.Module, args: Any, kwargs: Any, output: tuple[Tensor, Any]
) -> tuple[Tensor, Any]:
    hidden, context = output
    return hidden + kwargs["packed_seq_params"].deep[number], context
