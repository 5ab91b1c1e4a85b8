"""Rules about the two engines; `rules.py` says what a rule is and runs them.

megatron-core is looked up, never imported: a recipe is checked where it cannot run, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata, util

from vlmpack.capabilities.limits import ENGINE_LIMITS, Feature
from vlmpack.capabilities.versions import lacks_triton, version_limit
from vlmpack.recipe.problems import Problem
from vlmpack.recipe.schema import ModelSection, ParallelismSection

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
            "ranks into the same memory, and would sum them again; set parallelism.sequence: true, "
            "or use auto, full or a number"
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
        "'fsdp' needs model.backend: hf; with 'mcore' use none: "
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


def hf_is_data_parallel_only(model: ModelSection, parallelism: ParallelismSection) -> list[Problem]:
    """Everything but data parallelism is Megatron's."""
    if model.backend != "hf":
        return []
    limits, problems = ENGINE_LIMITS["hf"], []
    for name, feature in used_splits(parallelism).items():
        message = (
            f"{getattr(parallelism, name)} {limits[feature]}; with 'hf' it is 1, and "
            "parallelism.sharding: fsdp spreads a model's memory"
        )
        if name == "sequence":
            message = f"true {limits['SP']}, and parallelism.tensor >= 2; with 'hf' it is false"
        problems.append(Problem(("parallelism", name), message))
    return problems


def sequence_needs_tensor(model: ModelSection, parallelism: ParallelismSection) -> list[Problem]:
    """Sequence parallelism shards over the tensor-parallel processes."""
    if model.backend != "mcore" or not parallelism.sequence or parallelism.tensor > 1:
        return []
    message = (
        "true, but parallelism.tensor is 1 and sequence parallelism shards activations over the "
        "tensor-parallel processes; set it to false, or tensor to 2 or more"
    )
    return [Problem(("parallelism", "sequence"), message)]
