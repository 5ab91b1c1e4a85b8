"""Rules about the megatron-core engine; `rules.py` says what a rule is and runs them.

megatron-core is looked up, never imported: a recipe is checked where it cannot run, too.
"""

from __future__ import annotations

from importlib import metadata, util

from vlmpack.capabilities.versions import version_limit
from vlmpack.recipe.problems import Problem
from vlmpack.recipe.schema import ModelSection, ParallelismSection


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
    return mcore_version_fits(mcore_version()) if model.backend == "mcore" else []


def mcore_version_fits(version: str | None) -> list[Problem]:
    """What keeps `version` of megatron-core, None if absent, from being used."""
    limit = version_limit("megatron-core", version)
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


def aux_loss_needs_mcore(model: ModelSection) -> list[Problem]:
    """The hf engine trains experts without a load-balancing loss."""
    if model.router_aux_loss_coef == 0 or model.backend == "mcore":
        return []
    message = (
        f"{model.router_aux_loss_coef} needs model.backend: mcore; with 'hf' experts are trained "
        "without a load-balancing loss: leave it out"
    )
    return [Problem(("model", "router_aux_loss_coef"), message)]


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
