"""Rules about the model's own sizes, for the megatron-core engine.

They read the model folder's config.json, as JSON. A folder that is missing, or no transformers
model, breaks none of them: whoever loads the model says so. `rules.py` says what a rule is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path

from vlmpack.capabilities.limits import NO_EXPERTS
from vlmpack.capabilities.prediction import language_config
from vlmpack.recipe.problems import Problem
from vlmpack.recipe.schema import ModelSection, ParallelismSection

_STATE_HEADS = "linear_num_key_heads"
"""Heads of queries and keys of GatedDeltaNet."""

_STATE_GROUPS = ("n_groups", "mamba_n_groups")
_STATE_GROUP_HEADS = "mamba_num_heads"
"""Groups of heads of Mamba-2, by either name, and heads."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


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
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    values = content | dict(language_config(content))
    return ModelConfig(folder=model.path, content=content, values=values)


def layers_split_over_processes(
    config: ModelConfig, model: ModelSection, parallelism: ParallelismSection
) -> list[Problem]:
    """Each process gets as many heads and columns of a layer, each stage as many layers."""
    if model.backend != "mcore":
        return []
    heads = config.size("num_attention_heads")
    shared = {
        "tensor": {
            "num_attention_heads": heads,
            "num_key_value_heads": config.size("num_key_value_heads") or heads,
            "intermediate_size": config.size("intermediate_size"),
        },
        "pipeline": {"num_hidden_layers": config.size("num_hidden_layers")},
        "expert": {"num_experts": config.size(*_EXPERTS)},
    }
    state = config.size(_STATE_HEADS)
    if state:
        shared["tensor"][_STATE_HEADS] = state
    groups = config.size(*_STATE_GROUPS) if config.size(_STATE_GROUP_HEADS) else 0
    if groups:
        shared["tensor"][_STATE_GROUPS[0]] = groups
    problems = _state_over_context(config, parallelism, state, groups)
    for knob, sizes in shared.items():
        parts: int = getattr(parallelism, knob)
        uneven = [f"{key} {size}" for key, size in sizes.items() if size % parts]
        if uneven:
            message = (
                f"{parts} does not divide {' and '.join(uneven)} of {config.folder}/config.json; "
                f"sizes that do: {', '.join(map(str, _divisors(gcd(*sizes.values()))))}"
            )
            problems.append(Problem(("parallelism", knob), message))
    return problems


def _state_over_context(
    config: ModelConfig, parallelism: ParallelismSection, state: int, groups: int
) -> list[Problem]:
    """What tensor parallelism shares out of layers that carry state, context parallelism shares out
    once more: heads of GatedDeltaNet, and heads of Mamba-2 by groups or parts of them."""
    tensor, context = parallelism.tensor, parallelism.context
    uneven = ""
    if state % (tensor * context) and not state % tensor:
        uneven = f"{_STATE_HEADS} {state}"
    if groups and not groups % tensor:
        heads, own = config.size(_STATE_GROUP_HEADS), groups // tensor
        if heads % (tensor * context) or (own % context and context % own):
            uneven = f"{_STATE_GROUP_HEADS} {heads} in {_STATE_GROUPS[0]} {groups}"
    if not uneven:
        return []
    message = (
        f"{context} processes share out the heads of layers that carry state, and {uneven} of "
        f"{config.folder}/config.json is not divided by parallelism.tensor {tensor} x context "
        f"{context}"
    )
    return [Problem(("parallelism", "context"), message)]


def experts_are_there(
    config: ModelConfig, model: ModelSection, parallelism: ParallelismSection
) -> list[Problem]:
    """What is about experts needs a mixture of experts; tensor parallelism with experts needs
    sequence parallelism, as Megatron asks."""
    on_mcore = model.backend == "mcore"
    if config.size(*_EXPERTS):
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


def shares_heads(heads: int, groups: int, tensor: int, context: int) -> bool:
    """Whether ranks can each run a whole row for some of its query heads: as many each, with whole
    groups of key-value heads, or all in one.

    Args:
        heads: query heads.
        groups: key-value heads, which tensor parallelism divides.
        tensor: TP.
        context: CP.
    """
    if heads % (tensor * context):
        return False
    each, of_group = heads // (tensor * context), heads // groups
    return groups // tensor % context == 0 or of_group % each == 0


def _divisors(number: int) -> list[int]:
    """The divisors up to 64: no more than that share a layer."""
    return [size for size in range(1, min(number, 64) + 1) if number % size == 0]
