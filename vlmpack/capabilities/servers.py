"""What servers take of an export.

The facts are those of `tools/servers/facts.json`, which are read from the servers' loading code. A
test compares this table with them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vlmpack.errors import CapabilityError
from vlmpack.words import counted

_NO_CLASS = "it has no class for this architecture"
_OWN_CONFIG = "it reads a config.json with other keys than transformers' class has"
_NO_DORA = "it computes no magnitudes"
_NO_MODULES = "it has no place for modules in full beside adapters"
_ONE_SCALE = "it scales every layer's by alpha / rank"
_ONE_WIDTH = "it gives queries, keys and values of every layer one width"
_READ = "attention reads the weight of kv_b_proj, and never calls the layer (vllm#48974)"
_NO_PLACE = "it has no place for them"
_TOWER = ((r"^(model\.)?vision_tower\.(?!vision_model\.)", r"\1vision_tower.vision_model."),)
"""SigLIP as published files name it. Folders that transformers 5 made have another form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server, as its loading code was read.

    Args:
        refused: model_type -> why it does not take an export.
        renamed: model_type -> patterns of names that it has no place for, each with what it looks
            for instead.
        layers: model_type -> a pattern of names of layers whose adapters it does not compute, and
            why.
        needs: ends of layers' names, each with the end that a layer beside it must have.
        alone: model_type and an end of `needs` that has none beside it there.
        fused_experts: model_types of mixtures whose adapters it takes as `expert_form: parameters`
            has them. It takes others as `matrices`.
        refused_settings: keys of `trainable.lora` whose adapters it does not compute, each with
            why.
    """

    title: str
    refused: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    layers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)
    alone: Collection[tuple[str, str]] = ()
    fused_experts: Collection[str] = ()
    refused_settings: Mapping[str, str] = field(default_factory=dict)

    def check(
        self, model_type: str, adapted: Sequence[str] | None, settings: Collection[str] = ()
    ) -> None:
        """Check that it takes an export.

        Args:
            adapted: the components that an adapter folder has something of; None for the whole
                model.
            settings: keys of `trainable.lora` that are not as by default.

        Raises:
            CapabilityError: it does not.
        """
        if why := self.refused.get(model_type):
            raise CapabilityError(f"{self.title} does not load model_type {model_type}: {why}")
        if others := sorted(set(adapted or ()) - {"language"}):
            raise CapabilityError(
                f"{self.title} computes adapters on language layers alone, and these have some of "
                f"{' and '.join(others)}; add --merge for the whole model"
            )
        for key, why in self.refused_settings.items():
            if adapted is not None and key in settings:
                raise CapabilityError(
                    f"{self.title} does not take adapters with trainable.lora.{key}: {why}; add "
                    "--merge for the whole model"
                )

    def check_layers(self, model_type: str, layers: Collection[str]) -> None:
        """Check that it computes adapters of these layers, by their names.

        Raises:
            CapabilityError: it does not.
        """
        pattern, why = self.layers.get(model_type, ("$^", ""))
        wrong = [name for name in layers if re.search(pattern, name)]
        for name in [] if wrong else layers:
            start, _, end = name.rpartition(".")
            other = self.needs.get(end)
            if (model_type, end) in self.alone or other is None or f"{start}.{other}" in layers:
                continue
            wrong, why = [*wrong, name], f"beside {end} it needs those of {other}"
        if wrong:
            ends = sorted({name.rpartition(".")[2] for name in wrong})
            raise CapabilityError(
                f"{self.title} does not compute adapters of {', '.join(ends)} "
                f"({counted(len(wrong), 'layer')}): {why}. Train with other "
                "trainable.lora.targets, or add --merge for the whole model"
            )

    def expert_form(self, model_type: str) -> Literal["parameters", "matrices"]:
        """The form of experts' adapters that it takes."""
        return "parameters" if model_type in self.fused_experts else "matrices"

    def name(self, model_type: str, name: str) -> str:
        """The name that it looks for."""
        for pattern, other in self.renamed.get(model_type, ()):
            name = re.sub(pattern, other, name)
        return name


SERVERS: Mapping[str, Server] = {
    "vllm": Server(
        title="vLLM 0.33.0",
        refused={"nemotron_h_omni": _OWN_CONFIG},
        renamed={"gemma3": _TOWER, "llava_onevision": _TOWER},
        layers={
            "llava_onevision": ("", "its class takes no adapters"),
            **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), (r"\.kv_b_proj$", _READ)),
            "qwen3_vl_moe": (r"\.mlp\.(gate|up)_proj$", _NO_PLACE),
        },
        fused_experts=("qwen3_5_moe", "qwen3_vl_moe"),
        refused_settings={"dora": _NO_DORA, "modules_to_save": _NO_MODULES},
    ),
    "sglang": Server(
        title="SGLang 0.5.23",
        refused={
            "nemotron_h_omni": _OWN_CONFIG,
            **dict.fromkeys(("idefics3", "internvl", "llava_onevision", "smolvlm"), _NO_CLASS),
        },
        renamed={"gemma3": _TOWER},
        layers={
            **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified"), ("", _ONE_WIDTH)),
            **dict.fromkeys(("llava", "mistral3"), ("", "it gives them to the tower's layers too")),
            **dict.fromkeys(
                ("qwen3_5", "qwen3_5_moe"), (r"\.in_proj_\w+$|\.shared_expert_gate$", _NO_PLACE)
            ),
            **dict.fromkeys(
                ("qwen3_5_text", "qwen3_5_moe_text"),
                (r"\.linear_attn\.|\.[qkv]_proj$|\.shared_expert", _NO_PLACE),
            ),
            "nemotron_h": (r"\.in_proj$|\.experts\.", _NO_PLACE),
            "qwen3_vl_moe": (r"\.mlp\.(gate|up|down)_proj$", _NO_PLACE),
        },
        needs={
            "q_proj": "v_proj",
            "k_proj": "q_proj",
            "v_proj": "q_proj",
            "up_proj": "gate_proj",
            "q_a_proj": "kv_a_proj_with_mqa",
            "kv_a_proj_with_mqa": "q_a_proj",
        },
        alone=(("nemotron_h", "up_proj"),),
        refused_settings={
            "dora": _NO_DORA,
            "modules_to_save": _NO_MODULES,
            **dict.fromkeys(("rslora", "rank_pattern", "alpha_pattern"), _ONE_SCALE),
        },
    ),
}
