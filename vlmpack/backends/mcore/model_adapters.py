"""The adapters of a model on Megatron's engine: their layers, first values and merged weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.boxes import Kind, ReadSlice, TensorSlice
from vlmpack.backends.hf.adapted_experts import is_expert_tensor, merged_tensor, wrapper_of
from vlmpack.backends.hf.adapters import (
    adapter_shapes,
    adapter_targets,
    add_adapters,
    merged_layer,
)
from vlmpack.backends.mcore.adapters import MAGNITUDE, WEIGHT, add_to_language, add_to_tower
from vlmpack.backends.mcore.layout import language_pieces
from vlmpack.backends.mcore.model import MegatronVLM, tower_prefix
from vlmpack.backends.mcore.weights.base import split
from vlmpack.backends.policy import TrainingPolicy, is_adapter
from vlmpack.families.base import Family, ModulePaths
from vlmpack.recipe.trainable import LoraSection


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAdapters:
    """The adapters of a model; none by default.

    Args:
        shapes: whole shapes of their parameters under peft's names.
        drawn: their initial values, except DoRA's magnitudes.
        weights: whole shapes of the adapted weights of layers.
        experts: transformers' modules of experts, by the names of their adapted tensors.
    """

    lora: LoraSection = field(default_factory=LoraSection)
    targets: Sequence[str] = ()
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    drawn: dict[str, Tensor] = field(default_factory=dict)
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    experts: Mapping[str, nn.Module] = field(default_factory=dict)

    @classmethod
    def of(cls, skeleton: Any, paths: ModulePaths, policy: TrainingPolicy) -> ModelAdapters:
        """The adapters of a policy. The skeleton has peft's layers afterwards.

        Raises:
            CapabilityError: as `adapter_targets`.
        """
        if policy.lora is None:
            return cls()
        targets = adapter_targets(skeleton, paths, policy)
        tensors = [name for name in targets if is_expert_tensor(skeleton, name)]
        layers = (name for name in targets if name not in tensors)
        return cls(
            lora=policy.lora,
            targets=targets,
            shapes=dict(adapter_shapes(skeleton, targets, policy.lora)),
            weights={
                name + WEIGHT: tuple(skeleton.get_submodule(name).weight.shape) for name in layers
            },
            experts={name: skeleton.get_submodule(name.rpartition(".")[0]) for name in tensors},
            drawn=_drawn(skeleton, paths, policy, targets),
        )

    def add_to(self, model: MegatronVLM, family: Family) -> None:
        """Put them into a stage."""
        if not self.targets:
            return
        pieces_of = language_pieces(model, family)
        wrappers = {name: wrapper_of(experts, name) for name, experts in self.experts.items()}
        add_to_language(
            model.gpt, pieces_of, set(self.targets), self.lora, model.groups.tp, wrappers
        )
        if model.vision is not None:
            add_to_tower(model.vision, tower_prefix(family), self.targets, self.lora)

    def start(self, reader: ReadSlice) -> ReadSlice:
        """Reads weights, and the first values of adapters."""

        def read(kind: Kind, box: TensorSlice) -> Tensor | None:
            if kind != "model" or not is_adapter(box.name):
                return reader(kind, box)
            layer, _, what = box.name.partition(".lora_")
            if not what.startswith(MAGNITUDE):
                return self.drawn[box.name][box.index]
            name = layer + WEIGHT
            weight = reader(kind, split(name, self.weights[name], 0, box.start[0], box.stop[0]))
            assert weight is not None
            length: Tensor = torch.linalg.norm(weight, dim=1)  # B is zero
            return length

        return read

    def merged(self, name: str, whole_of: Callable[[str], Tensor]) -> Tensor:
        """A whole parameter with its adapters merged in."""
        value = whole_of(name)
        if name in self.experts:
            experts, scaling = self.experts[name], self.lora.scaling_of(name)
            return merged_tensor(value, experts, name, whole_of, scaling)
        if name not in self.weights:
            return value
        return merged_layer(value, name.removesuffix(WEIGHT), whole_of, self.lora)


def _drawn(
    skeleton: Any, paths: ModulePaths, policy: TrainingPolicy, targets: Sequence[str]
) -> dict[str, Tensor]:
    """Drawn by peft in its order, so that they begin as those of the hf engine."""
    for name in targets:
        weight = name if is_expert_tensor(skeleton, name) else name + WEIGHT
        module, _, own = weight.rpartition(".")
        # One number in the shape of a weight: peft puts adapters where a weight is.
        shaped = torch.zeros(()).expand(skeleton.get_parameter(weight).shape)
        shaped = nn.Parameter(shaped, requires_grad=False)
        setattr(skeleton.get_submodule(module), own, shaped)
    add_adapters(skeleton, paths, policy, device=torch.device("cpu"))
    drawn = {
        name: parameter.detach()
        for name, parameter in skeleton.named_parameters()
        if is_adapter(name)
    }
    skeleton.to("meta")
    return drawn
