"""Which versions of Transformer Engine Megatron's wrappers fit, and which `auto` may take.

Megatron's wrappers pass arguments by Transformer Engine's version, so each minor version of
megatron-core has a range (`capabilities.versions`). pip does not know it, and installs the newest.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from importlib import metadata

import torch

from vlmpack.capabilities.versions import (
    TRANSFORMER_ENGINE,
    how_to_install,
    transformer_engines,
    version_limit,
)
from vlmpack.errors import CapabilityError

PASSED_ON_GPU: Collection[tuple[str, str]] = ()
"""Pairs of versions, of megatron-core and of Transformer Engine, that `tests/gpu` has passed with
on a GPU. None yet: until one is added here Transformer Engine runs by name alone."""


def installed(package: str) -> str | None:
    """The version of a distribution, without what a build adds to it; None where there is none."""
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def why_no_transformer_engine(device: torch.device) -> str | None:
    """Why Transformer Engine cannot run here; None where it can."""
    if device.type != "cuda":
        return f"needs a CUDA device, this one is {device.type}; use auto or segments"
    limit = version_limit(TRANSFORMER_ENGINE, installed(TRANSFORMER_ENGINE))
    if limit is not None:
        minor, _ = transformer_engines()
        return f"{limit} (the versions that megatron-core {minor} is written for), or use auto"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:
        return (
            f"cannot be imported ({error}); build it against the torch that is installed: "
            f"{how_to_install(TRANSFORMER_ENGINE)}, or use auto"
        )
    return None


def require_transformer_engine(device: torch.device) -> None:
    """Raise CapabilityError where Transformer Engine cannot run, with what was found and wanted."""
    why = why_no_transformer_engine(device)
    if why is not None:
        raise CapabilityError(f"model.attention: transformer_engine {why}")


def passed_transformer_engine(device: torch.device, dtype: torch.dtype) -> str | None:
    """Transformer Engine's version if `auto` takes it, else None.

    `auto` takes it if it can run here, and `tests/gpu` has passed with this very version and
    megatron-core's.
    """
    version = installed(TRANSFORMER_ENGINE)
    if (installed("megatron-core"), version) not in PASSED_ON_GPU or dtype is torch.float32:
        return None
    return None if why_no_transformer_engine(device) is not None else version
