"""SGLang: how a registered class is built from a folder, and what it does with its names."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from tools.servers.adapters import Adapted, on_sglang
from tools.servers.interpreter import Interpreter
from tools.servers.layers import layer_hooks, modules
from tools.servers.loading import NotRegistered, Recorder
from tools.servers.statements import reader_of
from tools.servers.values import Class, Instance, Layer, Settings, Unknown

MODELS = "sglang.srt.models"
FOLLOWED = ("sglang",)
NAMESPACES = (
    "device",
    "model",
    "exec",
    "schedule",
    "memory",
    "spec",
    "lora",
    "disagg",
    "server_args",
    "flags",
    "resources",
    "forward",
)
"""Settings of a server that nothing here depends on, so they stay unknown."""
EXPERTS = "sglang.srt.layers.moe.fused_moe_triton.layer"

_NOT_FUSED = Settings(
    "shared_experts", num_fused_shared_experts=0, fusion_disabled=True, use_waterfill=False
)
_GROUP = Settings(
    "group", is_first_rank=True, is_last_rank=True, world_size=1, rank_in_group=0, first_rank=0
)
_ONE = Settings(
    "parallel",
    **{f"{name}_size": 1 for name in ("tp", "pp", "attn_tp", "attn_cp", "moe_tp", "moe_ep", "ep")},
    **{f"{name}_rank": 0 for name in ("tp", "pp", "attn_tp", "attn_cp", "moe_tp", "moe_ep", "ep")},
    **{f"{name}_group": _GROUP for name in ("pp", "tp", "attn_tp", "attn_cp", "moe_tp", "moe_ep")},
)


def _layers(
    count: int, layer_fn: Any, pp_rank: Any = None, pp_size: Any = None, **named: Any
) -> Any:
    prefix = named.get("prefix", "")
    made = modules(
        [layer_fn(idx=i, prefix=f"{prefix}.{i}" if prefix else str(i)) for i in range(count)]
    )
    return made if pp_rank is None or pp_size is None else (made, 0, count)


def _stage_layers(count: int, layer_fn: Any, **named: Any) -> Any:
    return _layers(count, layer_fn, 0, 1, **named)


def _expert_parameters(*_: Any, **named: Any) -> tuple[str, ...]:
    names = ("w13_weight", "w2_weight")
    return (*names, "w13_weight_bias", "w2_weight_bias") if named.get("with_bias") else names


def _as_sglang_reads(hf_config: Any) -> None:
    """What SGLang's own reader of a config.json, and its own classes, add to a configuration."""
    text = hf_config.get_text_config()
    for one in (hf_config, text):
        one.allow_global_per_layer_attribute_access = True
        one.encoder_only = one.language_only = False
    for key, value in vars(text).items():
        if value is not None and not hasattr(hf_config, key):
            setattr(hf_config, key, value)
    if text.model_type.startswith("qwen3_5"):
        text.layers_block_type = [kind.replace("full_", "") for kind in text.layer_types]
    if text.model_type == "nemotron_h":
        text.max_n_routed_experts = text.n_routed_experts
        text.get_nemotron_h_config_for_layer = lambda index: text
    hf_config.mm_patch_merge_type = "flat"


class Sglang:
    """A reader of SGLang, for one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.recorder = Recorder()
        experts = Layer("FusedMoE", _expert_parameters)
        self.hooks = (
            layer_hooks()
            | self.recorder.hooks()
            | {
                "get_parallel": lambda: _ONE,
                "get_pp_group": lambda: _ONE.known["pp_group"],
                **{f"get_{name}": partial(Settings, name) for name in NAMESPACES},
                "get_model": lambda: Settings("model", shared_experts=_NOT_FUSED),
                "get_platform": partial(Settings, "platform"),
                "_get_sgl_model_cls": self._class_of,
                "envs": Settings("envs"),
                **{name: Unknown(name) for name in ("get_rope", "get_rope_wrapper")},
                "declare_attn": partial(Settings, "attn"),
                "declare_ffn": partial(Settings, "ffn"),
                "append_stages": lambda *stages, **_: [Unknown("boundary")] * len(stages),
                "current_platform": Unknown("current_platform"),
                "get_mm": lambda: Settings("mm", mm_enable_dp_encoder=False),
                "is_cuda": lambda: True,
                **{
                    f"is_{name}": lambda: False
                    for name in ("hip", "npu", "cpu", "xpu", "musa", "mps")
                },
                "make_layers": _layers,
                "make_pp_layers": _stage_layers,
                "get_moe_impl_class": lambda *_: experts,
                "FusedMoE": experts,
                "cast": lambda kind, value: value,
                "groupby": lambda x, key=None: [
                    (k, iter(list(g))) for k, g in itertools.groupby(x, key)
                ],
                "set_weight_attrs": lambda *_, **__: None,
                "maybe_remap_kv_scale_name": lambda name, parameters: name,
                "ceil_div": lambda a, b: -(a // -b),
            }
        )
        self.reader: Interpreter = reader_of(root, "sglang", self.hooks, FOLLOWED)
        self.reader.tolerant = True  # its own classes of configurations are not read
        module = self.reader.module(EXPERTS)
        assert module is not None
        node = module.names["FusedMoE"]
        assert isinstance(node, ast.ClassDef)
        real = Class(self.reader, module, node)
        self.hooks.update(
            {n: self.reader.get(real, n) for n in real.members if n.startswith("make_expert")}
        )

    @cached_property
    def registry(self) -> dict[str, str]:
        """The modules of classes, by name."""
        found: dict[str, str] = {}
        folder = self.root.joinpath(*MODELS.split("."))
        for path in sorted(folder.rglob("*.py")):
            name = ".".join((MODELS, *path.relative_to(folder).with_suffix("").parts))
            entry = re.search(
                r"^EntryClass = (\[[^\]]*\]|\w+)", path.read_text(encoding="utf-8"), re.MULTILINE
            )
            found |= dict.fromkeys(re.findall(r"\w+", entry[1]) if entry else (), name)
        return found

    def _class_of(self, config: Any, kind: Any) -> Any:
        """SGLang's class for a part of a model, which it finds by transformers' own tables."""
        causal = kind.text.endswith("AutoModelForCausalLM")
        table = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if causal else MODEL_MAPPING_NAMES
        name = str(table[config.model_type])
        return self.reader.imported(self.registry[name], name)

    def build(self, hf_config: Any) -> Instance:
        """The model of a configuration."""
        _as_sglang_reads(hf_config)
        for name in hf_config.architectures:
            if name in self.registry:
                cls = self.reader.imported(self.registry[name], name)
                made: Instance = cls(config=hf_config, quant_config=None)
                made.attributes["shared_experts_config"] = _NOT_FUSED
                return made
        raise NotRegistered(f"SGLang has no class for {', '.join(hf_config.architectures)}")

    def adapted(
        self, model: Instance, shapes: Mapping[str, Any], config: Mapping[str, Any]
    ) -> Adapted:
        """What becomes of an adapter of those tensors, with that adapter_config.json."""
        return on_sglang(self.reader, model, shapes, config)
