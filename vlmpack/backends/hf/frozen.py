"""Frozen matrices in fewer bytes: bfloat16 where nothing is lost by it, or 4 bits (QLoRA).

Under autocast a float32 matrix is copied to bfloat16 for its product. A frozen matrix whose values
bfloat16 holds exactly, as in most published folders, can be stored in bfloat16. That takes 2 bytes
a weight instead of 6, and products are bit for bit the same.

QLoRA (2305.14314) keeps the frozen weights of adapted layers in 4 bits, by bitsandbytes. Only
layers with an adapter are quantised. Training uses the unpacked weight, so an adapter is merged
into that.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from sys import modules
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.hf.optimizer import require_bitsandbytes
from vlmpack.errors import CapabilityError

MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers that autocast runs in bfloat16; classes derived from them may do something else."""


def frozen_matrices(model: Any) -> Iterator[nn.Module]:
    """The layers whose `weight` is a matrix that is not trained; a shared one comes once."""
    children = read_by_dtype(model)
    embedding = model.get_input_embeddings()
    is_plain = type(embedding) is nn.Embedding
    # A head may share the weight of a table of a class of its own, which scales what it looks up.
    seen = set() if embedding is None or is_plain else {id(embedding.weight)}
    for module in model.modules():
        plain = type(module) in MATRICES or (module is embedding and is_plain)
        if not plain or id(module) in children:
            continue
        if module.weight.requires_grad or id(module.weight) in seen:
            continue
        seen.add(id(module.weight))
        yield module


def read_by_dtype(model: Any) -> set[int]:
    """Layers whose parent computes by the dtype of a child's weight, by id."""
    owners = (module for module in model.modules() if ".weight.dtype" in _source(module.__class__))
    return {id(child) for module in owners for child in module.children()}


def read_by_parents(model: Any) -> set[int]:
    """Layers whose weight or bias a parent reads itself, by id."""
    return {
        id(child)
        for module in model.modules()
        for name, child in module.named_children()
        if re.search(rf"\b{name}\.(weight|bias)\b", _source(module.__class__))
    }


@cache
def _source(of: type[nn.Module]) -> str:
    """The text of a class of transformers'."""
    if not of.__module__.startswith("transformers."):
        return ""
    # A class that was made for fused layers has no source, and reads what the one behind it does.
    defined = vars(modules[of.__module__])
    try:
        return inspect.getsource(
            next(one for one in of.__mro__ if defined.get(one.__name__) is one)
        )
    except (OSError, TypeError):
        return ".weight.dtype"  # without a source, it may ask for that


def hold_narrow(model: Any) -> int:
    """Store the frozen matrices of a float32 model in bfloat16, where that loses nothing; how many
    weights.
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


def check_quantization(device: torch.device) -> None:
    """Raise CapabilityError where 4-bit weights cannot be trained with adapters."""
    if device.type != "cuda":
        raise CapabilityError(
            f"trainable.lora.quantize: 'nf4' needs a CUDA GPU, this run is on {device}; use none"
        )
    require_bitsandbytes("trainable.lora.quantize: 'nf4'", "none")


def quantize_layers(
    model: Any, names: Iterable[str], *, device: torch.device, compute_dtype: torch.dtype
) -> None:
    """Replace linear layers by 4-bit ones, one by one.

    Args:
        device: a GPU for the packed weights; the rest of the model stays where it is.
    """
    import bitsandbytes as bnb

    for name in names:
        parent, _, leaf = name.rpartition(".")
        linear = model.get_submodule(name)
        packed = bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=compute_dtype,
            compress_statistics=True,  # double quantisation: about 0.4 bits a weight less
            quant_type="nf4",
            device="meta",
        )
        packed.weight = bnb.nn.Params4bit(
            linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4"
        )
        packed.bias = linear.bias
        setattr(model.get_submodule(parent), leaf, packed.to(device))  # packs it
    model.is_loaded_in_4bit = True  # what peft looks at


def is_packed(weight: Tensor) -> bool:
    """Whether a weight is in 4 bits."""
    return hasattr(weight, "quant_state")


def unpacked(weight: Any) -> Tensor:
    """A layer's weight (out, in); one in 4 bits in the dtype that it had before."""
    if not is_packed(weight):
        return weight  # type: ignore[no-any-return]
    import bitsandbytes as bnb

    whole: Tensor = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
    return whole


def _widely_unpacked(weight: Tensor) -> Tensor:
    return unpacked(weight).float()


def unpacked_weights(model: Any) -> dict[str, Callable[[], Tensor]]:
    """By the name of each 4-bit weight, a call that makes it (out, in) in float32 again."""
    return {
        f"{name}.weight": partial(_widely_unpacked, module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and is_packed(module.weight)
    }
