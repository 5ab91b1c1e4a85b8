"""Varlen kernels for CUDA: torch's own and flash-attn, behind the signature of `segment_attention`.

Both see physical boundaries: for a causal model an alignment gap counts as its segment's tail.
Neither has been run on a GPU by this version's tests unless docs/gpu.md says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from typing import Any, Literal

from torch import Tensor, nn

from vlmpack.attention.blocks import BlockMasks
from vlmpack.errors import CapabilityError
from vlmpack.packing.batch import PackedSeqParams

BLOCKS_NEED_MASKS = (
    "an image's tokens attend in both directions here, which takes a mask; segments has one"
)


HEAD_MULTIPLE = 8
"""torch's kernel, and flash-attn's without its public function, refuse heads of other widths."""


def whole_heads(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Query, key and value of heads that the kernels take, and the factor of their scores.

    Zeros behind the channels change no score; of the output the first channels are the result.

    Args:
        query, key, value: (T, H, D) each, of one D.
        scale: 1 / sqrt(D) if None.
    """
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    missing = -width % HEAD_MULTIPLE
    if missing:
        query, key, value = (nn.functional.pad(part, (0, missing)) for part in (query, key, value))
    return query, key, value, scale


@cache
def _takes_groups(varlen_attn: Callable[..., object]) -> bool:
    """Whether this torch's has a grouped-query form; 2.11's has none."""
    return "enable_gqa" in signature(varlen_attn).parameters


def _varlen_attention(
    name: Literal["torch_varlen", "flash_attn"],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: PackedSeqParams,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    masks: BlockMasks | None = None,
) -> Tensor:
    """A kernel of CUDA, for bf16 or fp16.

    Arguments and result as `segment_attention`; refuses masks (CapabilityError).
    """
    if masks is not None:
        raise CapabilityError(f"{name} cannot run: {BLOCKS_NEED_MASKS}")
    if params.forks is not None:
        raise ValueError(f"segments that go on from others need more than one call of {name}")
    left = -1 if window is None else window - 1
    sides = (left, 0 if causal else left)
    cu = params.cu_seqlens_physical
    bounds = (cu, cu, params.max_seqlen_q, params.max_seqlen_kv)
    if name == "flash_attn":
        from flash_attn import flash_attn_varlen_func

        output: Tensor = flash_attn_varlen_func(
            query, key, value, *bounds, softmax_scale=scale, causal=causal, window_size=sides
        )
        return output
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    grouped: dict[str, Any] = {}
    if groups > 1 and _takes_groups(varlen_attn):
        grouped = {"enable_gqa": True}
    elif groups > 1:  # as often in memory
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    own = query.shape[-1]
    query, key, value, scale = whole_heads(query, key, value, scale)
    found = varlen_attn(query, key, value, *bounds, scale=scale, window_size=sides, **grouped)
    assert isinstance(found, Tensor)  # a tuple only where the log-sum-exp was asked for
    return found[..., :own]


torch_varlen_attention = partial(_varlen_attention, "torch_varlen")
"""`torch.nn.attention.varlen.varlen_attn` (torch >= 2.10)."""

flash_attention = partial(_varlen_attention, "flash_attn")
"""`flash_attn.flash_attn_varlen_func` (the `flash-attn` extra)."""
