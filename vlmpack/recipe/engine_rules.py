"""Rules about the two engines, and about model sizes that megatron-core divides among processes.

Sizes come from config.json in the model folder, read as JSON. A folder that is missing, or is no
transformers model, breaks no rule here. The code that loads the model reports it. These rules look
megatron-core up and never import it, because a recipe is also checked on machines that cannot run
it.
`rules.py` says what a rule is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import TypeGuard

from vlmpack.capabilities.config import language_config
from vlmpack.capabilities.limits import ENGINE_LIMITS, NO_EXPERTS, Feature
from vlmpack.capabilities.refused import IN_IMAGES
from vlmpack.capabilities.versions import lacks_triton, version_limit
from vlmpack.recipe.head_degrees import HeadDegrees
from vlmpack.recipe.problems import Problem
from vlmpack.recipe.schema import ModelSection, ParallelismSection, TrainingSection
from vlmpack.recipe.shared_sizes import SharedSizes
from vlmpack.whole_file import read_json

_SPLITS: Mapping[str, Feature] = {
    "tensor": "TP",
    "sequence": "SP",
    "pipeline": "PP",
    "context": "CP",
    "expert": "EP",
}
"""Keys that spread a model copy over processes, each with its column of the capability table."""


def mcore_version() -> str | None:
    """The installed version of megatron-core; None where there is none."""
    if util.find_spec("megatron") is None:
        return None
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return None


def mcore_is_installed(model: ModelSection) -> list[Problem]:
    """The engine that is asked for is here, in a version that it was built for."""
    if model.backend != "mcore":
        return []
    version = mcore_version()
    limit = version_limit("megatron-core", version) or lacks_triton(version or "")
    return [] if limit is None else [Problem(("model", "backend"), f"'mcore' {limit}")]


def transformer_engine_needs_mcore(model: ModelSection) -> list[Problem]:
    """Transformer Engine's attention comes with Megatron's layers."""
    if model.attention != "transformer_engine" or model.backend == "mcore":
        return []
    message = (
        "'transformer_engine' needs model.backend: mcore; with 'hf' use auto, segments, "
        "torch_varlen or flash_attn"
    )
    return [Problem(("model", "attention"), message)]


def layers_compile_alone(model: ModelSection, training: TrainingSection) -> list[Problem]:
    """What a compiler makes of a layer takes the place of other kernels, and is in no graph."""
    broken = (
        (
            model.backend == "mcore",
            "needs model.backend: hf: Megatron's layers were never compiled",
        ),
        (training.cuda_graphs != "none", "was never captured; use training.cuda_graphs: none"),
        (model.fused_layers not in ("auto", "none"), "needs model.fused_layers: auto or none"),
    )
    return [
        Problem(("model", "compile"), f"'layers' {what}; or set it to false")
        for is_so, what in broken
        if model.compile and is_so
    ]


def long_rows_take_less(model: ModelSection, training: TrainingSection) -> list[Problem]:
    """What gives up time for memory is there, and leaves less of it to hold."""
    broken = (
        (model.backend == "mcore", "needs model.backend: hf"),
        (bool(model.compile), "changes layers that are compiled whole; use model.compile: false"),
        (training.cuda_graphs != "none", "was never captured; use training.cuda_graphs: none"),
    )
    keeps_all = model.activation_checkpointing == "none"
    inputs = (keeps_all, "moves inputs of recomputed layers, and activation_checkpointing is none")
    return [
        Problem(("model", name), f"true {what}; or set it to false")
        for name, ways in (("tiled_mlp", broken), ("activation_offloading", (*broken, inputs)))
        for is_so, what in ways
        if is_so and getattr(model, name)
    ]


def tiles_are_of_mlps(config: ModelConfig, model: ModelSection) -> list[Problem]:
    """There are MLPs beside experts, in configs that say which layers have none (Qwen's)."""
    step, alone = config.values.get("decoder_sparse_step"), config.values.get("mlp_only_layers")
    experts = config.shared_sizes.num_experts
    only = experts and step == 1 and not alone
    if not model.tiled_mlp or not only or config.shared_sizes.shared_expert_intermediate_size:
        return []
    message = (
        f"true, but each layer of {config.folder} has {experts} experts and no other MLP (its "
        "config.json has decoder_sparse_step 1 and no mlp_only_layers). Set it to false"
    )
    return [Problem(("model", "tiled_mlp"), message)]


def why_not_selective(model: ModelSection, parallelism: ParallelismSection) -> str | None:
    """Why what matrix products make cannot be kept for the backward pass; None where it can."""
    if model.attention == "transformer_engine":
        return (
            "model.attention: transformer_engine has its own, which would all be computed again; "
            "use auto, full or a number"
        )
    if parallelism.tensor > 1 and not parallelism.sequence:
        return (
            "without parallelism.sequence Megatron writes their sums over the tensor-parallel "
            "ranks into the same memory, and would sum them again. Set parallelism.sequence: "
            "true, or use auto, full or a number"
        )
    return None


def selective_keeps_products(model: ModelSection, parallelism: ParallelismSection) -> list[Problem]:
    """What `selective` keeps passes torch's dispatcher, and nothing writes over it."""
    why = why_not_selective(model, parallelism)
    if model.activation_checkpointing != "selective" or why is None:
        return []
    message = f"'selective' keeps what torch's matrix products make, and {why}"
    return [Problem(("model", "activation_checkpointing"), message)]


def fsdp_needs_hf(model: ModelSection, parallelism: ParallelismSection) -> list[Problem]:
    """Megatron shares out a model's memory in its own ways."""
    if parallelism.sharding != "fsdp" or model.backend == "hf":
        return []
    message = (
        "'fsdp' needs model.backend: hf. With 'mcore' use none. There "
        "parallelism.distributed_optimizer: true shards AdamW's state, and tensor and pipeline "
        "spread the parameters"
    )
    return [Problem(("parallelism", "sharding"), message)]


def fsdp_fields_need_fsdp(parallelism: ParallelismSection) -> list[Problem]:
    """What says how FSDP2 shards."""
    whole, problems = ParallelismSection(), []
    for name in ("replicate", "gradient_sync"):
        value = getattr(parallelism, name)
        if parallelism.sharding != "fsdp" and value != getattr(whole, name):
            message = (
                f"{value}, but parallelism.sharding is none; use fsdp (model.backend: hf), or "
                f"leave it out"
            )
            problems.append(Problem(("parallelism", name), message))
    return problems


def used_splits(parallelism: ParallelismSection) -> dict[str, Feature]:
    """The keys that spread a model copy over processes, each with its column of the table."""
    whole = ParallelismSection()
    return {
        name: feature
        for name, feature in _SPLITS.items()
        if getattr(parallelism, name) != getattr(whole, name)
    }


def hf_keeps_layers_whole(model: ModelSection, parallelism: ParallelismSection) -> list[Problem]:
    """What cuts a layer, or a model between layers, is Megatron's."""
    if model.backend != "hf":
        return []
    limits, problems = ENGINE_LIMITS["hf"], []
    for name, feature in used_splits(parallelism).items():
        if feature not in limits:
            continue
        message = (
            f"{getattr(parallelism, name)} {limits[feature]}; with 'hf' it is 1, and "
            "parallelism.sharding: fsdp spreads a model's memory"
        )
        if name == "sequence":
            message = f"true {limits['SP']}, and parallelism.tensor >= 2; with 'hf' it is false"
        problems.append(Problem(("parallelism", name), message))
    return problems


def hf_shares_rows_by_heads(
    config: ModelConfig, model: ModelSection, parallelism: ParallelismSection
) -> list[Problem]:
    """Ranks that exchange heads have as many each, of attention and of layers with a state."""
    if model.backend != "hf":
        return []
    try:
        config.head_degrees.chosen(parallelism, model.recomputed)
    except ValueError as error:
        knob = "context" if parallelism.context_heads is None else "context_heads"
        return [Problem(("parallelism", knob), f"{config.folder}/config.json: {error}")]
    return []


def context_heads_need_hf(model: ModelSection, parallelism: ParallelismSection) -> list[Problem]:
    """Megatron and Transformer Engine have ways of their own."""
    if model.backend == "hf" or parallelism.context_heads is None:
        return []
    message = f"{parallelism.context_heads} needs model.backend: hf; leave it out"
    return [Problem(("parallelism", "context_heads"), message)]


def sequence_needs_tensor(model: ModelSection, parallelism: ParallelismSection) -> list[Problem]:
    """Sequence parallelism shards over the tensor-parallel processes."""
    if model.backend != "mcore" or not parallelism.sequence or parallelism.tensor > 1:
        return []
    message = (
        "true, but parallelism.tensor is 1 and sequence parallelism shards activations over the "
        "tensor-parallel processes. Set it to false, or tensor to 2 or more"
    )
    return [Problem(("parallelism", "sequence"), message)]


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
        """The kind of each layer with one part alone (Nemotron-H); empty otherwise."""
        said = self.values.get("layers_block_type") or self.values.get("hybrid_override_pattern")
        return tuple(_KINDS.get(str(kind), str(kind)) for kind in said) if _is_list(said) else ()

    @property
    def shared_sizes(self) -> SharedSizes:
        """The sizes that processes divide, as the mcore engine reads them."""
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

    @property
    def head_degrees(self) -> HeadDegrees:
        """What ranks that share a row on the hf engine need to know."""
        heads = self.size("num_attention_heads")
        groups = {self.shared_sizes.num_key_value_heads}
        if self.values.get("attention_k_eq_v"):
            groups.add(self.size("num_global_key_value_heads"))
        others = self.values.get("per_layer_config")
        for layer in others.values() if isinstance(others, Mapping) else ():
            if isinstance(layer, Mapping):
                groups.add(int(layer.get("num_key_value_heads") or 0))
        blocks = self.content.get("model_type") == "gemma3" or (
            self.values.get("use_bidirectional_attention") == IN_IMAGES
        )
        why = "has latent attention" if self.size("kv_lora_rank") else ""
        why = "has per-layer inputs" if self.size("hidden_size_per_layer_input") else why
        why = "has image tokens that attend in both directions" if blocks else why
        pairs = ((heads, number) for number in sorted(groups - {0}) if heads)
        sizes = self.shared_sizes
        states = (
            (
                "linear_num_value_heads",
                self.size("linear_num_value_heads"),
                sizes.linear_num_key_heads,
            ),
            ("mamba_num_heads", sizes.mamba_num_heads, sizes.n_groups),
        )
        return HeadDegrees(tuple(pairs), why, tuple(one for one in states if one[1] and one[2]))


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple | str)


def read_model_config(
    model: ModelSection, base_dir: str | os.PathLike[str] | None = None
) -> ModelConfig | None:
    """The model folder's config.json; None where it cannot be read.

    Args:
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
    problems = config.shared_sizes.uneven(parallelism, f"{config.folder}/config.json")
    return [Problem(("parallelism", knob), message) for knob, message in problems]


def experts_are_there(
    config: ModelConfig, model: ModelSection, parallelism: ParallelismSection
) -> list[Problem]:
    """Expert settings need experts; with TP they need sequence parallelism, as Megatron asks."""
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
