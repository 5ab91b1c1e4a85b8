"""Rules about the megatron-core engine; `rules.py` says what a rule is and runs them.

megatron-core is looked up, never imported: a recipe is checked where it cannot run, too.
"""

from __future__ import annotations

import re
from importlib import metadata, util

from vlmpack.recipe.problems import Problem
from vlmpack.recipe.schema import ModelSection, ParallelismSection

LOWEST, BELOW = "0.16.1", "0.17"
"""The megatron-core versions that the engine is built for, as in pyproject.toml."""


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
    if version is None:
        message = (
            "'mcore' needs megatron-core, which is not installed; pip install 'vlmpack[mcore]'"
        )
    elif _release(LOWEST) <= _release(version) < _release(BELOW):
        return []
    else:
        message = (
            f"'mcore' needs megatron-core >= {LOWEST} and < {BELOW}, found {version}; "
            "pip install 'vlmpack[mcore]'"
        )
    return [Problem(("model", "backend"), message)]


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


def _release(version: str) -> tuple[int, ...]:
    """`0.16.1rc0+cu` -> (0, 16, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
