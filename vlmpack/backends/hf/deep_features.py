"""DeepStack in transformers' decoder: image features added to the output of the first layers.

transformers indexes the row with a mask there, which on a GPU reads its count on the host twice a
layer. Features that are as long as the row, zero but at the placeholders, are added as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor


def take_whole_rows(language: Any) -> None:
    """Let a decoder take deep features of every slot, where it gets no mask; for good, and the
    class's own forward, which has a mask, goes on working.

    Args:
        language: transformers' decoder, of a class with DeepStack.
    """
    if "_deepstack_process" not in vars(language):
        language._deepstack_process = partial(_process, language._deepstack_process)


def _process(
    stock: Callable[..., Tensor], hidden: Tensor, mask: Tensor | None, features: Tensor
) -> Tensor:
    """(B, S, D) hidden states with a layer's features; those of every slot are (B * S, D)."""
    if mask is not None:
        return stock(hidden, mask, features)
    return hidden + features.view_as(hidden)
