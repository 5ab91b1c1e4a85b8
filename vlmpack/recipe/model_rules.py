"""Rules about the model's own sizes, for the megatron-core engine.

They read the model folder's config.json, as JSON. A folder that is missing, or no transformers
model, breaks none of them: whoever loads the model says so. `rules.py` says what a rule is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from vlmpack.capabilities.limits import NO_EXPERTS
from vlmpack.capabilities.prediction import language_config
from vlmpack.recipe.problems import Problem
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.recipe.shared_sizes import SharedSizes
from vlmpack.whole_file import read_json

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SHARED_EXPERT = ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size")
_SCAN_GROUPS = ("mamba_n_groups", "n_groups")
"""Keys that say the same, the one that transformers prefers in front."""

_KINDS = {"M": "linear_attention", "mamba": "linear_attention", "E": "moe", "-": "mlp"}
"""Layers of Nemotron-H by older names, and by the letters of `hybrid_override_pattern`."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a config.json says about the language model.

    Args:
        folder: `model.path`, as the recipe has it.
        content: all of it.
        values: the keys of the language model, those at the top where it has no section.
    """

    folder: str
    content: Mapping[str, object]
    values: Mapping[str, object]

    def size(self, *keys: str) -> int:
        """The first of these keys that is a positive integer; 0 where none is."""
        for key in keys:
            value = self.values.get(key)
            if isinstance(value, int) and value > 0:
                return value
        return 0

    @property
    def part_kinds(self) -> tuple[str, ...]:
        """What each layer is where it is a mixer, an MLP or experts alone (Nemotron-H); empty where
        that is not said, or each layer has several."""
        said = self.values.get("layers_block_type") or self.values.get("hybrid_override_pattern")
        return tuple(_KINDS.get(str(kind), str(kind)) for kind in said) if _is_list(said) else ()

    @property
    def shared_sizes(self) -> SharedSizes:
        """What processes share out, as the mcore engine reads it of the same folder: config.json
        has sizes of kinds of layers that the model has none of, too."""
        parts = self.part_kinds
        layers = parts or self.values.get("layer_types")
        carries_state = not _is_list(layers) or "linear_attention" in layers
        heads = self.size("num_attention_heads")
        scan_heads = self.size("mamba_num_heads") if carries_state else 0
        experts = self.size(*_EXPERTS) if not parts or "moe" in parts else 0
        vision = self.content.get("vision_config")
        deep = vision.get("deepstack_visual_indexes") if isinstance(vision, Mapping) else None
        return SharedSizes(
            num_hidden_layers=len(parts) or self.size("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=self.size("num_key_value_heads") or heads,
            intermediate_size=self.size("intermediate_size") if not parts or "mlp" in parts else 0,
            num_experts=experts,
            shared_expert_intermediate_size=self.size(*_SHARED_EXPERT) if experts else 0,
            linear_num_key_heads=self.size("linear_num_key_heads") if carries_state else 0,
            mamba_num_heads=scan_heads,
            n_groups=self.size(*_SCAN_GROUPS) if scan_heads else 0,
            deepstack_layers=len(deep) if _is_list(deep) else 0,
        )


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple | str)


def read_model_config(
    model: ModelSection, base_dir: str | os.PathLike[str] | None = None
) -> ModelConfig | None:
    """The model folder's config.json; None where it cannot be read.

    Args:
        model: the recipe's section.
        base_dir: folder that a relative `model.path` starts at. None: the current directory.
    """
    try:
        path = Path(base_dir or "", model.path, "config.json")
        content = read_json(path)
    except (OSError, ValueError):
        return None
    values = content | dict(language_config(content))
    return ModelConfig(folder=model.path, content=content, values=values)


def layers_split_over_processes(
    config: ModelConfig, model: ModelSection, parallelism: ParallelismSection
) -> list[Problem]:
    """Each process gets as many heads and columns of a layer, each stage as many layers."""
    if model.backend != "mcore":
        return []
    found = config.shared_sizes.uneven(parallelism, f"{config.folder}/config.json")
    return [Problem(("parallelism", knob), message) for knob, message in found]


def experts_are_there(
    config: ModelConfig, model: ModelSection, parallelism: ParallelismSection
) -> list[Problem]:
    """What is about experts needs a mixture of experts; tensor parallelism with experts needs
    sequence parallelism, as Megatron asks."""
    on_mcore = model.backend == "mcore"
    if config.shared_sizes.num_experts:
        if not on_mcore or parallelism.tensor == 1 or parallelism.sequence:
            return []
        message = (
            f"false, but {config.folder} has experts and parallelism.tensor is "
            f"{parallelism.tensor}; use true, or tensor: 1"
        )
        return [Problem(("parallelism", "sequence"), message)]
    none = f"{config.folder} {NO_EXPERTS} (its config.json has none of {', '.join(_EXPERTS)})"
    problems = []
    if on_mcore and parallelism.expert > 1:
        problems.append(
            Problem(("parallelism", "expert"), f"{parallelism.expert}, but {none}; use 1")
        )
    if model.router_aux_loss_coef:
        message = f"{model.router_aux_loss_coef}, but {none}; leave it out"
        problems.append(Problem(("model", "router_aux_loss_coef"), message))
    return problems
