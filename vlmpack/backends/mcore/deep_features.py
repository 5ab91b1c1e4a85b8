"""DeepStack in Megatron's decoder: image features added to the output of the first layers.

They travel with the row's params, since with pipeline stages several micro-batches are under way at
a time, and are added outside of what is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn


def add_after(layers: Sequence[nn.Module]) -> None:
    """Let each layer add its features, (T', 1, D), from the params that it is called with.

    Args:
        layers: the first of the decoder, one for each tensor in `RowParams.deep`.
    """
    for number, layer in enumerate(layers):
        layer.register_forward_hook(partial(_add, number), with_kwargs=True)


def _add(
    number: int, module: nn.Module, args: Any, kwargs: Any, output: tuple[Tensor, Any]
) -> tuple[Tensor, Any]:
    hidden, context = output
    return hidden + kwargs["packed_seq_params"].deep[number], context
