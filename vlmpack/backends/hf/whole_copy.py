"""A whole transformers model that answers for an engine whose weights are sharded.

    the model as its class builds it, without values
        <- every buffer, saved or not, and every parameter, whole, one after the other

The copy computes what one process computes with the same float32 weights, under the same autocast.
A weight is stored in the compute dtype where autocast would cast it anyway, which is in a product.
Vectors and adapters stay float32. Embeddings, and under DoRA the weights of adapted layers, stay
float32 where bfloat16 does not hold them exactly. So does the first weight of each of transformers'
models, by which their code asks for the dtype of all.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlmpack.backends.adapter_folder import ADAPTER
from vlmpack.backends.hf.adapted_experts import expert_weights
from vlmpack.backends.hf.frozen import BASE, frozen_matrices, widened
from vlmpack.backends.policy import is_adapter
from vlmpack.model_folder.load import build_model, load_config

Whole = Iterable[tuple[list[str], Tensor]]
"""Names that share a parameter, and its values in float32."""


def without_values(auto_class: Any, folder: Path) -> Any:
    """The folder's model on the meta device. It cannot use the trained model's config, which names
    the attention of rows by now."""
    with torch.device("meta"):
        return build_model(auto_class, load_config(folder))


def shared_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter: tied ones have several."""
    by_storage: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_storage.setdefault(id(parameter), []).append(name)
    return list(by_storage.values())


def whole_parameters(model: nn.Module) -> Whole:
    """The whole parameters of a model that may be sharded. Collective."""
    own = dict(model.named_parameters(remove_duplicate=False))
    for names in shared_names(model):
        value = own[names[0]].detach()  # a layer's attribute may be its working weight
        yield names, value.full_tensor() if isinstance(value, DTensor) else value.clone()


def copy_buffers(source: nn.Module, target: nn.Module, device: torch.device) -> None:
    """All of them, saved or not."""
    for name, value in source.named_buffers(remove_duplicate=False):
        _put(target, name, value.to(device, copy=True))


@torch.no_grad()
def fill_whole(model: Any, tensors: Whole, dtype: torch.dtype) -> Any:
    """Fill a model without values from an engine, and return it in eval mode. Collective if
    `tensors` is.

    Args:
        tensors: all parameters; each is freed before the next is requested.
    """
    model.requires_grad_(False)
    embedding = model.get_input_embeddings()
    products = set() if dtype is torch.float32 else _products(model)
    exact = {id(embedding.weight), *_normed(model)}
    missing = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for names, tensor in tensors:
        place = model.get_parameter(names[0])
        narrow = tensor.to(dtype) if id(place) in products else tensor
        if id(place) in exact and not torch.equal(narrow.to(tensor.dtype), tensor):
            narrow = tensor
        if place is embedding.weight and narrow.dtype is not torch.float32:
            embedding.register_forward_hook(widened)
        parameter = nn.Parameter(narrow, requires_grad=False)
        for name in names:
            _put(model, name, parameter)
        missing -= set(names)
    assert not missing, f"no values for the parameters {sorted(missing)}"
    return model.eval()


def _normed(model: nn.Module) -> set[int]:
    """Weights that DoRA takes the norms of, in float32."""
    names = {name for name, _ in model.named_modules()}
    return {
        id(value)
        for name, value in model.named_parameters()
        if f"{name.partition(BASE)[0]}.lora_magnitude_vector.{ADAPTER}" in names
    }


def _products(model: Any) -> set[int]:
    """Parameters that are read by products alone, which autocast computes in its dtype; or by these
    and by the embedding."""
    from transformers import PreTrainedModel

    adapters = {id(value) for name, value in model.named_parameters() if is_adapter(name)}
    weights: list[Any] = [layer.weight for layer in frozen_matrices(model)]
    embedding = model.get_input_embeddings().weight
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    first = {id(next(part.parameters())) for part in parts} - {id(embedding)}
    return {id(weight) for weight in (*weights, *expert_weights(model))} - adapters - first


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, own = name.rpartition(".")
    setattr(model.get_submodule(path), own, value)
