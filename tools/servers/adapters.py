"""Which module of a server each layer of an adapter ends in.

The names of classes, mappings and functions are read from the server's source, and functions that
map names are followed there. What stands in loops over layers is written again here, after the
functions that `BY_HAND` names. The facts have a digest of each, so that another source is seen.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from tools.servers.interpreter import Interpreter
from tools.servers.layers import modules_of
from tools.servers.tensors import Weight
from tools.servers.values import Class, Instance, Raised, Unknown, last_name

BY_HAND: Mapping[str, tuple[str, ...]] = {
    "vllm": (
        "lora.utils.get_supported_lora_modules",
        "lora.utils.is_supported_lora_module",
        "lora.utils.process_packed_modules_mapping",
        "lora.model_manager.LoRAModelManager._create_lora_modules",
        "lora.model_manager.LoRAModelManager._get_punica_wrapper",
        "lora.model_manager.LoRAModelManager._create_merged_loras_inplace",
        "lora.model_manager.LoRAModelManager._get_text_lora_names",
        "lora.model_manager.LoRAModelManager._stack_moe_lora_weights",
        "lora.model_manager.LoRAModelManager._validate_moe_lora_format",
        "lora.lora_model.LoRAModel.from_local_checkpoint",
        "lora.worker_manager.WorkerLoRAManager._load_adapter",
        *(
            f"lora.layers.{module}.{cls}.can_replace_layer"
            for module, cls in (
                ("column_parallel_linear", "ColumnParallelLinearWithLoRA"),
                ("column_parallel_linear", "MergedColumnParallelLinearWithLoRA"),
                ("column_parallel_linear", "QKVParallelLinearWithLoRA"),
                ("column_parallel_linear", "MergedQKVParallelLinearWithLoRA"),
                ("column_parallel_linear", "MergedColumnParallelLinearVariableSliceWithLoRA"),
                ("row_parallel_linear", "RowParallelLinearWithLoRA"),
                ("replicated_linear", "ReplicatedLinearWithLoRA"),
                ("fused_moe", "FusedMoEWithLoRA"),
                ("fused_moe", "FusedMoE3DWithLoRA"),
            )
        ),
    ),
    "sglang": (
        "srt.lora.lora.LoRAAdapter._process_weight",
        "srt.lora.lora.LoRAAdapter._normalize_weights",
        "srt.lora.lora_manager.LoRAManager.init_lora_modules",
        "srt.lora.lora_manager.LoRAManager.init_lora_shapes",
        "srt.lora.mem_pool.LoRAMemoryPool.init_buffers",
        "srt.lora.mem_pool.LoRAMemoryPool.load_lora_weight_to_buffer",
        "srt.lora.layers.get_lora_layer",
        "srt.lora.utils.get_hidden_dim",
        "srt.lora.utils.auto_detect_lora_target_modules",
    ),
}
"""Functions of a server that are written again here."""

_LINEAR = {
    *("ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear"),
    *("RowParallelLinear", "ReplicatedLinear", "GateLinear"),
}


@dataclass(slots=True)
class Adapted:
    """What became of an adapter's layers at a server.

    Args:
        ends: by the name of a layer in the adapter's file, the server's modules that compute it.
        refused: names that the server does not take, each with why; "" for the whole adapter.
        asks_for_all: whether SGLang has to be started with `--lora-target-modules all`.
    """

    ends: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    asks_for_all: bool = False


def digests(reader: Interpreter) -> dict[str, str]:
    """The functions of `BY_HAND`, each with the start of a digest of its source."""
    found = {}
    for full in BY_HAND[reader.package]:
        start, name = f"{reader.package}.{full}".rsplit(".", 1)
        module = reader.module(start)
        if module is None:
            start, _, cls = start.rpartition(".")
            node = Class(reader, _module(reader, start), _class(reader, start, cls)).members[name]
        else:
            node = module.names[name]  # type: ignore[assignment]
        found[full] = hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:16]
    return found


def _module(reader: Interpreter, name: str) -> Any:
    module = reader.module(name)
    assert module is not None, name
    return module


def _class(reader: Interpreter, module: str, name: str) -> Any:
    return _module(reader, module).names[name]


def layers_of(names: Iterable[str]) -> list[str]:
    """The layers that tensors of an adapter are for, each once."""
    return list(dict.fromkeys(name.partition(".lora_")[0] for name in names))


def kind(module: Any) -> str:
    """The class of layers that a module is of, where it is one that adapters know."""
    line = module.cls.line if isinstance(module.cls, Class) else [module.cls]
    names = [last_name(one) for one in line]
    known = _LINEAR | {"MoERunner", "FusedMoE", "ParallelLMHead", "VocabParallelEmbedding"}
    return next((name for name in names if name in known), "")


def given(reader: Interpreter, module: Any, name: str, default: Any = None) -> Any:
    """An attribute that a module may have."""
    try:
        found = reader.get(module, name)
    except Raised:
        return default
    return default if isinstance(found, Unknown) else found


def on_vllm(reader: Interpreter, model: Instance, names: Iterable[str]) -> Adapted:
    """What vLLM does with the layers of an adapter."""
    adapted = Adapted()
    if not (isinstance(model.cls, Class) and model.cls.is_a("SupportsLoRA")):
        adapted.refused[""] = "its class takes no adapters"
        return adapted
    modules = modules_of(model)
    is_3d = given(reader, model, "is_3d_moe_weight", False)
    packed = dict(_packed(reader, model))
    if not is_3d and any(kind(module) == "MoERunner" for _, module in modules):
        packed["experts"] = _experts(reader, modules)
    supported = {
        *(n for _, m in modules for n in given(reader, m, "embedding_modules", None) or ()),
        *(n.rpartition(".")[2] for n, m in modules if kind(m) in _LINEAR | {"MoERunner"}),
    }
    places = _vllm_places(reader, model, packed, supported)
    expected = {one for name in supported for one in packed.get(name, [name])}
    expected |= {"experts"} & supported
    parse = reader.imported("vllm.lora.utils", "parse_fine_tuned_lora_name")
    mapper = given(reader, model, "hf_to_vllm_mapper")
    mapper = None if mapper is None else reader.get(mapper, "get_rename_mapper")()
    latent = any(last_name(module.cls) == "MLAAttention" for _, module in modules)
    skipped = tuple(given(reader, model, "lora_skip_prefixes", ()) or ())
    for layer in layers_of(names):
        own, _ = parse(f"{layer}.lora_A.weight", mapper)
        at = own.find(".experts")
        end = own[at + 1 :] if at >= 0 else own.rpartition(".")[2]
        if end == "kv_b_proj" and latent:
            adapted.refused[layer] = "attention reads its weight, and never calls the layer"
        elif any(f".{one}" in layer or layer.startswith(one) for one in skipped):
            adapted.refused[layer] = "left out by the server"
        elif at >= 0 and end.startswith("experts") and own not in places:
            form = "all experts' in one" if is_3d else "those of each expert"
            adapted.refused[layer] = f"it takes matrices as {form}"
        elif "base_layer" not in layer and end not in expected:
            adapted.refused[layer] = f"{end} is not among the layers that it expects"
        elif own not in places:
            adapted.refused[layer] = f"no module computes {own}"
        else:
            adapted.ends[layer] = places[own]
    return adapted


def _vllm_places(
    reader: Interpreter, model: Instance, packed: Mapping[str, list[str]], supported: set[str]
) -> dict[str, list[str]]:
    """By the name of a layer, the modules that vLLM wraps for it."""
    mapping = given(reader, model, "get_mm_mapping")
    prefix = reader.get(mapping(), "language_model")[0] if mapping is not None else None
    non_gated = given(reader, model, "is_non_gated_moe", False)
    places: dict[str, list[str]] = {}
    seen: set[int] = set()
    for name, module in modules_of(model):
        last = name.rpartition(".")[2]
        of_text = prefix is None or name.startswith(prefix)
        router = non_gated and name.endswith("mixer.gate")
        parts = packed.get(last, [])
        if last not in supported or not of_text or router or id(module) in seen:
            continue
        if not _wrapped(module, len(parts)):
            continue
        seen.add(id(module))
        start = name.rpartition(".")[0]
        of_module = [f"{start}.{part}" for part in parts] if len(parts) > 1 else [name]
        if kind(module) == "MoERunner" and not parts:
            of_module = [name, f"{name}.base_layer"]
        for one in of_module:
            for text in (one, *_text_names(one, prefix)):
                places.setdefault(text, []).append(name)
    return places


def _packed(reader: Interpreter, model: Instance) -> Mapping[str, list[str]]:
    own = given(reader, model, "packed_modules_mapping", {})
    if own:
        return own  # type: ignore[no-any-return]
    found: dict[str, list[str]] = {}
    for child in model.attributes.values():
        if isinstance(child, Instance) and child.is_module:
            found |= given(reader, child, "packed_modules_mapping", {}) or {}
    return found


def _experts(reader: Interpreter, modules: list[tuple[str, Any]]) -> list[str]:
    """What each expert's matrices are called in a folder, as the model's own list has them."""
    for _, module in modules:
        mapping = given(reader, module, "get_expert_mapping")
        if mapping is not None:
            return [str(name).rstrip(".") for _, name, *_ in mapping()]
    return []


def _wrapped(module: Any, parts: int) -> bool:
    """Whether a class of layers with adapters takes a module that packs so many."""
    name, exact = kind(module), last_name(module.cls) == kind(module)
    if name == "MergedColumnParallelLinear":
        sizes = module.attributes.get("output_sizes")
        return parts > 0 or (isinstance(sizes, list | tuple) and len(sizes) > 2)
    if name == "QKVParallelLinear":
        return exact and parts in (1, 3)
    if name in ("ColumnParallelLinear", "RowParallelLinear"):
        return exact
    return bool(name)


def _text_names(name: str, prefix: str | None) -> list[str]:
    start = f"{(prefix or '').rstrip('.')}."
    if prefix is None or not name.startswith(start):
        return []
    name = name.removeprefix(start)
    return [name] if name.startswith(("model.", "lm_head")) else [f"model.{name}", name]


def on_sglang(
    reader: Interpreter, model: Instance, shapes: Mapping[str, Any], config: Mapping[str, Any]
) -> Adapted:
    """What SGLang does with the tensors of an adapter.

    It reads from the adapter's config which layers get a place. Where this leaves some out, it is
    asked again with `--lora-target-modules all`.

    Args:
        shapes: names and shapes of its tensors.
        config: its adapter_config.json.
    """
    use = partial(reader.imported, "sglang.srt.lora.utils")
    adapted = _with_targets(
        reader,
        model,
        shapes,
        config,
        use("get_normalized_target_modules")(config["target_modules"]),
    )
    if not adapted.refused:
        return adapted
    try:
        every = _detected(reader, model)
        for target, index in product(sorted(every), range(_text(model).num_hidden_layers)):
            if target not in ("embed_tokens", "lm_head"):
                _sides(reader, model, target, index)
    except Raised:
        return adapted
    again = _with_targets(reader, model, shapes, config, every)
    return (
        replace(again, asks_for_all=True) if len(again.refused) < len(adapted.refused) else adapted
    )


def _detected(reader: Interpreter, model: Instance) -> set[str]:
    """What `--lora-target-modules all` stands for."""
    use = partial(reader.imported, "sglang.srt.lora.utils")
    raw: set[str] = set()
    for name, module in modules_of(model):
        last, parent = name.rpartition(".")[2], ".".join(name.split(".")[-2:])
        of_kind = {"ParallelLMHead": {"lm_head"}, "VocabParallelEmbedding": {"embed_tokens"}}
        of_kind["FusedMoE"] = {"gate_up_proj", "down_proj"}
        if kind(module) in _LINEAR:
            indexer = use("DSA_INDEXER_LORA_NAMES")
            ends = {one.rpartition(".")[2] for one in indexer}
            raw |= {parent} if parent in indexer else {last} - ends
        raw |= of_kind.get(kind(module), set())
    known = use("_KNOWN_LORA_TARGET_MODULES")
    found: set[str] = use("get_normalized_target_modules")(sorted(raw)) & known
    found |= {*(given(reader, model, "supported_lora_modules") or ())} & known
    return found


def _with_targets(
    reader: Interpreter,
    model: Instance,
    shapes: Mapping[str, Any],
    config: Mapping[str, Any],
    targets: set[str],
) -> Adapted:
    adapted = Adapted()
    target_of = reader.imported("sglang.srt.lora.utils", "get_target_module_name")
    wrapped = _sglang_modules(reader, model, targets)
    for index, weights in _sglang_layers(reader, model, shapes, adapted.refused).items():
        places: dict[str, list[str]] = {}
        for name, module in wrapped.get(index, {}).items():
            experts = kind(module) == "FusedMoE"
            for key in _EXPERTS if experts else (target_of(name, targets),):
                places.setdefault(key, []).append(name)
        taken: dict[tuple[str, str], str] = {}
        for name, weight in weights.items():
            try:
                key = target_of(name, targets)
                moe = re.search(r"experts\.(\d+)\.", name)
                if "shared_experts." not in name and moe:
                    key += "_moe"
                side = "A" if "lora_A" in name else "B"
                wrong = _sglang_wrong(reader, model, key, side, index, weight, int(config["r"]))
                if taken.setdefault((key + (moe[1] if moe else ""), side), name) != name:
                    wrong = f"{key} of a layer gets it twice"
                if not wrong and key not in places:
                    wrong = f"no module computes {key}"
            except Raised as raised:
                wrong = str(raised).partition(" in {")[0].partition(" in set(")[0]
            for layer in layers_of(weight.names):
                if wrong:
                    adapted.refused.setdefault(layer, wrong)
                else:
                    adapted.ends[layer] = places[key]
    for layer in layers_of(shapes):
        if layer not in adapted.ends:
            adapted.refused.setdefault(layer, "it is in no layer, so it is left out in silence")
    adapted.ends = {n: to for n, to in adapted.ends.items() if n not in adapted.refused}
    return adapted


_EXPERTS = ("gate_up_proj_moe", "down_proj_moe")


def _sglang_modules(
    reader: Interpreter, model: Instance, targets: set[str]
) -> dict[int, dict[str, Any]]:
    layer_id = reader.imported("sglang.srt.layers.utils.common", "get_layer_id")
    applies = given(reader, model, "should_apply_lora")
    found: dict[int, dict[str, Any]] = {}
    seen: set[int] = set()
    for name, module in modules_of(model):
        if id(module) in seen or (applies is not None and not applies(name)):
            continue
        seen.add(id(module))
        parts = name.split(".")
        named = parts[-1] in targets or ".".join(parts[-2:]) in targets
        experts = kind(module) == "FusedMoE" and {"gate_up_proj", "down_proj"} <= targets
        if (named or experts) and kind(module) and (index := layer_id(name)) is not None:
            found.setdefault(index, {})[name] = module
    return found


def _sglang_layers(
    reader: Interpreter, model: Instance, shapes: Mapping[str, Any], refused: dict[str, str]
) -> dict[int, dict[str, Weight]]:
    """The tensors of each layer, joined as SGLang joins them; what it cannot join is refused."""
    layer_id = reader.imported("sglang.srt.layers.utils.common", "get_layer_id")
    layers: dict[int, dict[str, Weight]] = {}
    for name, shape in shapes.items():
        if (index := layer_id(name)) is not None:
            value = torch.empty(shape, device="meta")
            layers.setdefault(index, {})[name] = Weight(value, frozenset([name]))
    times = given(reader, model, "get_stacked_multiply")
    gated = times is None or times("gate_up_proj_moe") == 2
    adapter = Instance(reader.imported("sglang.srt.lora.lora", "LoRAAdapter"))
    adapter.attributes |= {"_moe_is_gated_by_layer": dict.fromkeys(layers, gated)}

    def join(weights: dict[str, Weight]) -> dict[str, Weight]:
        for name in _STEPS:
            step = reader.get(adapter, name)
            takes_names = len(step.node.args.args) == 3
            step(list(weights), weights) if takes_names else step(weights)
        return weights

    for index, weights in layers.items():
        try:
            layers[index] = join(dict(weights))
        except Raised:
            qkv = [name for name in weights if re.search(r"\.[qkv]_proj\.", name)]
            why = "it takes queries, keys and values of a layer together"
            refused |= dict.fromkeys(layers_of(qkv), why)
            layers[index] = join({n: weight for n, weight in weights.items() if n not in qkv})
    return layers


_STEPS = (
    *("normalize_qkv_proj", "_rename_expert_w_to_proj", "_normalize_in_proj"),
    *("_normalize_in_proj_qkvz", "normalize_gate_up_proj", "normalize_fused_qkv_a_proj"),
)
"""Steps of SGLang's `LoRAAdapter._normalize_weights`, but those for families not read here."""


def _text(model: Instance) -> Any:
    config = model.attributes["config"]
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _sides(reader: Interpreter, model: Instance, key: str, index: int) -> tuple[int, int]:
    """Width of the input and of the output of a layer, as SGLang's class says."""
    own = given(reader, model, "get_hidden_dim")
    if own is not None:
        found = own(key, index)
    else:
        default = reader.imported("sglang.srt.lora.utils", "get_default_hidden_dim")
        found = default(key, model.attributes["config"], index)
    return found  # type: ignore[no-any-return]


def _sglang_wrong(
    reader: Interpreter, model: Instance, key: str, side: str, index: int, weight: Weight, rank: int
) -> str:
    """Why a tensor does not fit its place; empty where it does."""
    text = _text(model)
    shared = (getattr(text, name, 0) for name in _SHARED)
    has_experts = any(kind(module) == "FusedMoE" for _, module in modules_of(model))
    if key in ("gate_up_proj", "down_proj") and has_experts and not any(shared):
        return f"it has no place for {key} beside experts"
    into, out = _sides(reader, model, key, index)
    times = reader.imported("sglang.srt.lora.utils", "get_stacked_multiply")(key, model)
    expected = (rank * times, into) if side == "A" else (out, rank)
    found = tuple(weight.value.shape)
    return "" if found == expected else f"its {key} is {expected}, and not {found}"


_SHARED = ("shared_expert_intermediate_size", "n_shared_experts")
