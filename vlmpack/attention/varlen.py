"""The varlen attention interface: one signature, several kernels, chosen once and reported."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from vlmpack.attention.blocks import BlockMasks
from vlmpack.attention.by_boundaries import boundary_attention
from vlmpack.attention.kernels import (
    BLOCKS_NEED_MASKS,
    flash_attention,
    torch_varlen_attention,
)
from vlmpack.attention.segments import segment_attention
from vlmpack.errors import CapabilityError
from vlmpack.packing.batch import PackedSeqParams

AttentionName = Literal["segments", "torch_varlen", "flash_attn"]

ImplementationName = Literal[AttentionName, "boundaries"]
"""`boundaries` is no name of a recipe: what is recorded where no varlen kernel runs."""


class VarlenAttention(Protocol):
    """Attention inside the segments of a THD row; see `segment_attention` for the arguments."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        params: PackedSeqParams,
        *,
        causal: bool = True,
        scale: float | None = None,
        window: int | None = None,
        masks: BlockMasks | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The implementation that runs, and why.

    Args:
        name: the implementation's name.
        function: the implementation.
        reason: one phrase for the log.
        image_blocks: whether each call must say which tokens attend in both directions.
    """

    name: ImplementationName
    function: VarlenAttention
    reason: str
    image_blocks: bool = False


_FUNCTIONS: dict[ImplementationName, VarlenAttention] = {
    "segments": segment_attention,
    "boundaries": boundary_attention,
    "torch_varlen": torch_varlen_attention,
    "flash_attn": flash_attention,
}


LARGEST_HEAD = 256
"""Channels of a head that flash-attn 2 and torch's varlen kernel, which is made of it, can have."""


def why_unavailable(
    name: ImplementationName,
    device: torch.device,
    dtype: torch.dtype,
    *,
    image_blocks: bool = False,
    largest_head: int = 0,
    fixed_shape: bool = False,
) -> str | None:
    """Why an implementation cannot run here, or None if it can."""
    if name == "segments":
        return "segments follows lengths on the host, which no graph can" if fixed_shape else None
    if image_blocks:
        return BLOCKS_NEED_MASKS
    if name == "boundaries":
        quadratic = "boundaries computes T x T scores: for tests on a CPU"
        return quadratic if device.type == "cuda" else None
    if largest_head > LARGEST_HEAD:
        return (
            f"{name} takes heads of at most {LARGEST_HEAD} channels, the model has {largest_head}"
        )
    if device.type != "cuda":
        return f"{name} needs a CUDA device, this one is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{name} needs bfloat16 or float16, the model computes in {dtype}"
    if name == "flash_attn":
        return _why_not_importable(
            "flash_attn", "flash_attn_varlen_func", "flash-attn 2.7 or newer"
        )
    return _why_not_importable("torch.nn.attention.varlen", "varlen_attn", "torch 2.10 or newer")


def _why_not_importable(module: str, function: str, wanted: str) -> str | None:
    """Import for real: a package that is there may still be broken or built for another torch."""
    try:
        getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, OSError) as error:
        return f"{module}.{function} cannot be imported ({error}); wanted: {wanted}"
    return None


def choose_attention(
    requested: AttentionName | Literal["auto"],
    *,
    device: torch.device,
    dtype: torch.dtype,
    image_blocks: bool = False,
    largest_head: int = 0,
    fixed_shape: bool = False,
) -> AttentionChoice:
    """Choose the varlen implementation once, at build time.

    Args:
        requested: `model.attention` of the recipe; `auto` takes the first that can run of
            flash_attn, torch_varlen, segments; for captured rows `boundaries` is the last one.
        device: where the model is.
        dtype: what attention computes in.
        image_blocks: whether the tokens of an image attend in both directions.
        largest_head: channels of the widest head, where kernels may have less; 0 where not.
        fixed_shape: whether a graph will capture the rows, so that nothing may follow segments.

    Raises:
        CapabilityError: the requested one cannot run here; the message says why.
    """
    candidates: tuple[ImplementationName, ...] = ("flash_attn", "torch_varlen", "segments")
    if fixed_shape:
        candidates = (*candidates[:-1], "boundaries")
    if requested != "auto":
        candidates = (requested,)
    refused: list[str] = []
    for name in candidates:
        why = why_unavailable(
            name,
            device,
            dtype,
            image_blocks=image_blocks,
            largest_head=largest_head,
            fixed_shape=fixed_shape,
        )
        if why is None:
            first = "as the recipe asks" if name == requested else "first choice"
            reason = "; ".join(refused) or first
            return AttentionChoice(name, _FUNCTIONS[name], reason, image_blocks)
        if why not in refused:
            refused.append(why)
    instead = "set training.cuda_graphs: none" if fixed_shape else "use auto or segments"
    raise CapabilityError(f"model.attention: {requested} cannot run: {refused[0]}; {instead}")
