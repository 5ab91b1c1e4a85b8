"""Frozen matrices held in bfloat16 where nothing is lost by it: 2 bytes a weight instead of 6.

Under autocast a matrix in float32 is copied to bfloat16 for its product. One that is not trained
and whose values bfloat16 has exactly, as those of most published folders, may as well lie in it:
products are the same bit for bit, and there is no copy. Vectors (norms, biases), whose arithmetic
is float32, and parameters that no plain layer owns (experts, position tables) stay. Looked-up
embeddings are widened again, since what layers add to is float32. Where a class asks for the dtype
of a layer's weight, to cast what it computes with, that layer stays as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers that autocast runs in bfloat16; classes derived from them may do something else."""


def frozen_matrices(model: Any) -> Iterator[nn.Module]:
    """The layers whose `weight` is a matrix that is not trained; a shared one comes once.

    Args:
        model: transformers', with or without storage; `requires_grad` says what is trained.
    """
    asking = {of for of in {type(module) for module in model.modules()} if _asks_for_dtype(of)}
    owners = (module for module in model.modules() if type(module) in asking)
    asked = {id(child) for module in owners for child in module.children()}
    embedding = model.get_input_embeddings()
    is_plain = type(embedding) is nn.Embedding
    # A head may share the weight of a table of a class of its own, which scales what it looks up.
    seen = set() if embedding is None or is_plain else {id(embedding.weight)}
    for module in model.modules():
        plain = type(module) in MATRICES or (module is embedding and is_plain)
        if not plain or id(module) in asked:
            continue
        if module.weight.requires_grad or id(module.weight) in seen:
            continue
        seen.add(id(module.weight))
        yield module


def _asks_for_dtype(of: type[nn.Module]) -> bool:
    """Whether a class of transformers' computes by the dtype of a child's weight."""
    if not of.__module__.startswith("transformers."):
        return False
    try:
        return ".weight.dtype" in inspect.getsource(of)
    except (OSError, TypeError):
        return True


def hold_narrow(model: Any) -> int:
    """Hold the frozen matrices of a model in bfloat16, those of them that lose nothing.

    Args:
        model: transformers', with its weights in float32.

    Returns:
        How many weights are held so.
    """
    held, embedding = 0, model.get_input_embeddings()
    embeddings = None if embedding is None else embedding.weight
    for module in frozen_matrices(model):
        weight: Any = module.weight
        narrow = weight.data.to(torch.bfloat16)
        if not torch.equal(narrow.float(), weight.data):
            continue
        if weight is embeddings:
            embedding.register_forward_hook(widened)
        weight.data = narrow
        held += weight.numel()
    return held


def widened(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    """A hook of embeddings in bfloat16: what layers add to is float32."""
    return output.float()
