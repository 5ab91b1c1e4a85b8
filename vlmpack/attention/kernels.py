"""Varlen kernels for CUDA: torch's own and flash-attn, behind the signature of `segment_attention`.

Both see physical boundaries: for a causal model an alignment gap counts as its segment's tail.
Neither has been run on a GPU by this version's tests unless the README says so.
"""

from __future__ import annotations

from torch import Tensor

from vlmpack.attention.blocks import BlockMasks
from vlmpack.errors import CapabilityError
from vlmpack.packing.batch import PackedSeqParams

BLOCKS_NEED_MASKS = (
    "an image's tokens attend in both directions here, which takes a mask; segments has one"
)


def _refuse_masks(name: str, masks: BlockMasks | None) -> None:
    if masks is not None:
        raise CapabilityError(f"{name} cannot run: {BLOCKS_NEED_MASKS}")


def torch_varlen_attention(
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
    """`torch.nn.attention.varlen.varlen_attn` (CUDA, bf16 or fp16, torch >= 2.10).

    Arguments and result as `segment_attention`; refuses masks (CapabilityError).
    """
    _refuse_masks("torch_varlen", masks)
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if window is None else window - 1
    right = 0 if causal else left
    cu = params.cu_seqlens_physical
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # torch 2.11's kernel has no grouped-query form
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    output = varlen_attn(
        query,
        key,
        value,
        cu,
        cu,
        params.max_seqlen_q,
        params.max_seqlen_kv,
        scale=scale,
        window_size=(left, right),
    )
    assert isinstance(output, Tensor)  # a tuple only where the log-sum-exp was asked for
    return output


def flash_attention(
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
    """`flash_attn.flash_attn_varlen_func` (CUDA, bf16 or fp16; the `flash-attn` extra).

    Arguments and result as `segment_attention`; refuses masks (CapabilityError).
    """
    _refuse_masks("flash_attn", masks)
    from flash_attn import flash_attn_varlen_func

    left = -1 if window is None else window - 1
    cu = params.cu_seqlens_physical
    output: Tensor = flash_attn_varlen_func(
        query,
        key,
        value,
        cu,
        cu,
        params.max_seqlen_q,
        params.max_seqlen_kv,
        softmax_scale=scale,
        causal=causal,
        window_size=(left, 0 if causal else left),
    )
    return output
