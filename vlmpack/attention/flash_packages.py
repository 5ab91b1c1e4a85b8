"""Where `flash_attn_varlen_func` of FlashAttention 2, 3 and 4 comes from.

Each version has a package of its own. Versions 3 and 4 also come as builds of the hub, which the
package `kernels` loads. It reads them from this machine alone: from `LOCAL_KERNELS`, or from the
hub's cache. So no launch fetches code.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from typing import Any, Literal

import torch

FlashName = Literal["flash_attn", "flash_attn_3", "flash_attn_4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashPackage:
    """One version of FlashAttention.

    Args:
        module: that has the function, in the version's own package.
        wanted: that package, as pip or its project names it.
        oldest: the least major compute capability of a GPU; 0 where the package says itself.
        repository: of the hub, and the build's version there; None where there is none.
        unbounded: the side of a window that has no bound.
    """

    module: str
    wanted: str
    oldest: int = 0
    repository: tuple[str, int] | None = None
    unbounded: int | None = -1


FLASH_PACKAGES: Mapping[FlashName, FlashPackage] = {
    "flash_attn": FlashPackage(module="flash_attn", wanted="flash-attn 2.7 or newer"),
    "flash_attn_3": FlashPackage(
        module="flash_attn_interface",
        wanted="flash-attn-3, the folder `hopper` of flash-attention",
        oldest=8,
        repository=("kernels-community/flash-attn3", 1),
    ),
    "flash_attn_4": FlashPackage(
        module="flash_attn.cute",
        wanted="pip install --pre flash-attn-4",
        oldest=9,
        repository=("kernels-community/flash-attn4", 0),
        unbounded=None,
    ),
}


TAKEN = frozenset(
    {
        *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("softmax_scale", "causal", "window_size"),
    }
)
"""The function's arguments beside queries, keys and values."""


@cache
def flash_varlen(name: FlashName) -> Callable[..., Any]:
    """`flash_attn_varlen_func` of a version; a launch looks for it once.

    Raises:
        ImportError: neither its package nor a build for `kernels` is here; with both reasons.
    """
    package = FLASH_PACKAGES[name]
    sources = [(package.module, partial(importlib.import_module, package.module))]
    if package.repository is not None:
        sources.append((package.repository[0], partial(_from_kernels, *package.repository)))
    refused: list[str] = []
    for place, load in sources:
        try:
            function: Callable[..., Any] = load().flash_attn_varlen_func
            if missing := TAKEN - signature(function).parameters.keys():
                raise ImportError(f"it takes no {', '.join(sorted(missing))}")
        except Exception as error:  # whatever a build raises on import
            refused.append(f"{place}.flash_attn_varlen_func cannot be imported ({error})")
        else:
            return function
    raise ImportError(f"{'; '.join(refused)}; wanted: {package.wanted}")


def _from_kernels(repository: str, version: int) -> Any:
    from huggingface_hub import constants
    from kernels import get_kernel

    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        return get_kernel(repository, version=version)
    finally:
        constants.HF_HUB_OFFLINE = offline


def why_no_flash(name: FlashName, device: torch.device) -> str | None:
    """Why a version cannot run on a CUDA device; None where it can. It is imported for real: a
    package that is there may still be broken or built for another torch."""
    try:
        flash_varlen(name)
    except ImportError as error:
        return str(error)
    oldest = FLASH_PACKAGES[name].oldest
    if oldest and (major := torch.cuda.get_device_capability(device)[0]) < oldest:
        return f"{name} needs compute capability {oldest}.0 or newer, {device} has {major}"
    return None
