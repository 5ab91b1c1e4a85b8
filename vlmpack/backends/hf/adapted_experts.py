"""Adapters of routed experts, computed for all experts of a layer at once.

transformers keeps a layer's experts in tensors of one module, and peft (`target_parameters`) wraps
that module once for each tensor, the last one outermost. Its own forward makes W + s B A for every
expert, which is as large as the weights. Here tokens are sorted by expert, and each product is one
grouped product over all experts:

    y = x W_e^T + s (x A_e^T) B_e^T

peft's A is (E rank, in), the rows of one expert after those of another. Its B is (out, rank E), in
which every E-th column belongs to one expert:

    E = 2, rank 2      A rows     e0 e0 e1 e1
                       B columns  e0 e1 e0 e1

Shapes: T tokens, K experts of a token, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from vlmpack.backends.adapter_folder import ADAPTER, PREFIX
from vlmpack.backends.linear_layers import operands
from vlmpack.backends.policy import TrainingPolicy, component_of, is_untouched
from vlmpack.errors import CapabilityError
from vlmpack.families.base import ModulePaths
from vlmpack.model_folder.weights import first
from vlmpack.recipe.trainable import LoraSection
from vlmpack.words import counted

BASE_LAYER = "base_layer"
"""peft's name for what a wrapper wraps."""
_ROW_BYTES = 16
"""Rows of what a grouped product reads begin at multiples of it."""


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of routed experts, by name: those for which transformers has several forms."""
    for name, module in model.named_modules():
        if hasattr(module, "_is_expert_parallel"):
            yield name, module


def expert_tensors(experts: nn.Module) -> list[str]:
    """The names of a module's matrices, in peft's order. Biases have one dimension less."""
    return [name for name, value in experts.named_parameters(recurse=False) if value.ndim == 3]


def expert_weights(model: nn.Module) -> list[nn.Parameter]:
    """The matrices of experts, which any form multiplies in the compute dtype."""
    return [
        part.get_parameter(name)
        for _, part in expert_modules(model)
        for name in expert_tensors(part)
    ]


def is_adaptable(experts: Any) -> bool:
    """Whether `adapted_experts` computes all that a module of experts does."""
    return not (experts.has_bias or experts.has_post_expert_norm)


def wrapper_of(experts: nn.Module, target: str) -> str:
    """The name of the wrapper around a tensor of a module of experts."""
    path, _, own = target.rpartition(".")
    tensors = expert_tensors(experts)
    return path + f".{BASE_LAYER}" * (len(tensors) - 1 - tensors.index(own))


def expert_wrapper(model: nn.Module, target: str) -> str:
    """The same, of a tensor of a model."""
    return wrapper_of(model.get_submodule(target.rpartition(".")[0]), target)


def expert_targets(model: nn.Module, paths: ModulePaths, policy: TrainingPolicy) -> list[str]:
    """Names of the tensors of routed experts in components with mode lora."""
    return [
        f"{name}.{tensor}"
        for name, experts in expert_modules(model)
        if policy.mode(component_of(name, paths)) == "lora" and not is_untouched(name, paths)
        if is_adaptable(experts)
        for tensor in expert_tensors(experts)
    ]


def is_expert_tensor(model: nn.Module, name: str) -> bool:
    """Whether a target is a tensor of experts."""
    path, _, own = name.rpartition(".")
    return own in model.get_submodule(path)._parameters


def describe_targets(
    model: nn.Module, targets: Sequence[str], paths: ModulePaths, policy: TrainingPolicy
) -> str:
    """What has adapters, counted, and what `experts` would add.

    Args:
        model: before adapters are added.
    """
    tensors = [name for name in targets if is_expert_tensor(model, name)]
    said, lora = counted(len(targets) - len(tensors), "linear layer"), policy.lora
    assert lora is not None
    if tensors:
        routers = sum(".router." in name for name in targets)
        said += f", {counted(len(tensors), 'tensor')} of routed experts, "
        return said + (f"{routers} of the layers are routers" if routers else "no router")
    if others := expert_targets(model, paths, policy):
        shapes = (expert_shapes(model, name, lora.rank_of(name)) for name in others)
        added = sum(prod(shape) for each in shapes for _, shape in each)
        said += f", no routed experts (targets: [.., experts] would train {added:,} more)"
    return said


def expert_shapes(
    model: nn.Module, target: str, rank: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the parameters of one tensor's adapter."""
    path, _, own = target.rpartition(".")
    experts: Any = model.get_submodule(path)
    number, rows, columns = getattr(experts, own).shape
    if experts.is_transposed:
        rows, columns = columns, rows
    wrapper = expert_wrapper(model, target)
    yield f"{wrapper}.lora_A.{ADAPTER}.weight", (number * rank, columns)
    yield f"{wrapper}.lora_B.{ADAPTER}.weight", (rows, rank * number)


def taken_for_experts(model: Any, config: Any) -> set[str]:
    """Layers, as in an adapter config, whose names peft reads as those of routed experts."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    read = deepcopy(config)
    convert_peft_config_for_transformers(read, model, None)
    return {*config.target_modules} - {*read.target_modules}


def refuse_unreadable(model: Any, targets: Sequence[str], lora: LoraSection) -> None:
    """Raise CapabilityError for adapters that peft would not read where it moves them."""
    from peft import LoraConfig

    knob = "dora" if lora.dora else "dropout"
    if not lora.dora and not lora.dropout:
        return
    if names := taken_for_experts(model, LoraConfig(target_modules=list(targets))):
        raise CapabilityError(
            f"trainable.lora.{knob}: peft reads adapters of {first(sorted(names))} of "
            f"{type(model).__name__} as those of a tensor, which have none; leave it out, or "
            "trainable.lora.targets: attention"
        )


_ATTENTION = re.compile(r"(in_proj_)?(q|k|v|o|qkvz?|kv|out|query|key|value|proj|projection)(_|$)")
"""Beginnings of names in attention, without gates and decays."""


def is_attentions(model: nn.Module, name: str) -> bool:
    """Whether a layer makes queries, keys, values or outputs of attention, linear or not."""
    path, _, own = name.rpartition(".")
    while path:
        kinds = (kind.__name__ for kind in type(model.get_submodule(path)).__mro__)
        if any("Attention" in kind or "DeltaNet" in kind for kind in kinds):
            return _ATTENTION.match(own) is not None
        path, _, own = path.rpartition(".")
    return False


def by_expert(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """peft's (E rank, in) A and (out, rank E) B as (E, rank, in) and (E, out, rank) views."""
    down = a.view(experts, -1, a.shape[1])
    return down, b.view(b.shape[0], -1, experts).permute(2, 0, 1)


def merged_tensor(
    weight: Tensor, experts: Any, target: str, part: Callable[[str], Tensor], scaling: float
) -> Tensor:
    """A tensor of experts by its name, with the adapter that `part` has by its names inside.

    Args:
        weight: (E, out, in), or (E, in, out) where the module says so.
    """
    wrapper = wrapper_of(experts, target)
    a, b = (part(f"{wrapper}.lora_{kind}.{ADAPTER}.weight") for kind in "AB")
    down, up = by_expert(a, b, len(weight))
    update = scaling * (up @ down)
    return weight + (update.mT if experts.is_transposed else update)


def write_matrices(model: nn.Module, config: Any, tensors: dict[str, Tensor]) -> None:
    """Replace adapters of tensors of experts, as they are written, by one for each matrix.

    Gate and up share A, which is written for both.

    Args:
        config: peft's; its targets follow.
        tensors: the content of the file by its names.
    """
    parts = {"gate_up_proj": ("gate_proj", "up_proj")}
    for inner, module in expert_modules(model):
        path = inner.partition(f".{BASE_LAYER}")[0]
        for tensor in expert_tensors(module):
            wrapper, names = wrapper_of(module, f"{path}.{tensor}"), parts.get(tensor, (tensor,))
            a, b = (tensors.pop(f"{PREFIX}{wrapper}.lora_{kind}.weight") for kind in "AB")
            config.target_parameters.remove(f"{path}.{tensor}")
            each = zip(*by_expert(a, b, len(module.get_parameter(tensor))), strict=True)
            for number, (down, up) in enumerate(each):
                for name, rows in zip(names, up.chunk(len(names)), strict=True):
                    matrix = f"{path}.{number}.{name}"
                    tensors[f"{PREFIX}{matrix}.lora_A.weight"] = down.clone()
                    tensors[f"{PREFIX}{matrix}.lora_B.weight"] = rows.contiguous()
                    config.target_modules.append(matrix)
    config.target_parameters = config.target_parameters or None


class _Update(NamedTuple):
    """The adapter of one tensor: its layers and its scale."""

    a: nn.Linear
    b: nn.Linear
    scale: float


class _AdaptedExperts:
    """The `forward` of the outermost wrapper of a module of experts."""

    base_layer: Any

    def forward(self, hidden: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        """As transformers' experts: (T, D), (T, K) int64 and (T, K) -> (T, D)."""
        from peft.tuners.lora.layer import ParamWrapper

        experts: Any = self
        updates: dict[str, _Update] = {}
        is_plain = True
        while isinstance(experts, ParamWrapper):
            wrapper: Any = experts
            is_plain &= wrapper.active_adapter in (ADAPTER, [ADAPTER]) and not wrapper.merged
            if not wrapper.disable_adapters:
                a, b = wrapper.lora_A[ADAPTER], wrapper.lora_B[ADAPTER]
                updates[wrapper.parameter_name] = _Update(a, b, wrapper.scaling[ADAPTER])
            experts = wrapper.base_layer
        if not is_plain:
            own: Tensor = super().forward(hidden, index, scores)  # type: ignore[misc]
            return own
        if not updates:
            base: Tensor = experts(hidden, index, scores)
            return base
        return adapted_experts(experts, updates, hidden, index, scores)


def fuse_experts(model: nn.Module) -> None:
    """Replace the `forward` of peft's outermost wrapper of each module of experts."""
    from peft.tuners.lora.layer import ParamWrapper

    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    inner = {id(wrapper.base_layer) for wrapper in wrappers}
    for wrapper in wrappers:
        if id(wrapper) not in inner:
            changed: Any = wrapper
            changed.__class__ = _derived(type(wrapper))


@cache
def _derived(own: type) -> type:
    if issubclass(own, _AdaptedExperts):
        return own
    return type(f"Fused{own.__name__}", (_AdaptedExperts, own), {"__module__": own.__module__})


def adapted_experts(
    experts: Any, updates: dict[str, _Update], hidden: Tensor, index: Tensor, scores: Tensor
) -> Tensor:
    """What a module of experts with adapters makes of its tokens.

    Args:
        experts: transformers' module.
        updates: by the names of its tensors.
        hidden: (T, D).
        index: (T, K) int64, the experts of each token.
        scores: (T, K), what their outputs are weighed with.

    Returns:
        (T, D).
    """
    kind = hidden.device.type
    names = expert_tensors(experts)
    dtype = getattr(experts, names[0]).dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    chosen, order = torch.sort(index.flatten(), stable=True)
    numbers = torch.arange(experts.num_experts, device=chosen.device)
    ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)

    def product(x: Tensor, name: str) -> Tensor:
        weight = getattr(experts, name).to(dtype)
        own = _grouped(x, weight if experts.is_transposed else weight.mT, ends)
        if name not in updates:
            return own
        a, b, scale = updates[name]
        # A rank whose rows would begin elsewhere gets zeros, which add nothing.
        short = -(len(operands(a)[0]) // len(weight)) % (_ROW_BYTES // dtype.itemsize)
        down, up = by_expert(operands(a)[0].to(dtype), operands(b)[0].to(dtype), len(weight))
        down, up = pad(down, (0, 0, 0, short)), pad(up.mT.contiguous(), (0, 0, 0, short))
        return torch.add(own, _grouped(_grouped(x, down.mT, ends), up, ends), alpha=scale)

    first, last = names
    inner = product(hidden[order // index.shape[1]].to(dtype), first)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    output = product(inner.to(dtype), last) * scores.flatten()[order][:, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    summed: Tensor = output[back].view(*index.shape, -1).sum(dim=1)
    return summed.to(hidden.dtype)


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """(S, in) rows sorted by expert, (E, in, out) weights and (E,) ends of rows -> (S, out)."""
    product: Tensor = torch.nn.functional.grouped_mm(x, weight, offs=ends)
    return product
