"""Varlen attention that reads segments from the boundaries' tensor alone, as a dense mask.

T x T scores, so nothing to train large rows with. It is the form that can be recorded on a device
without a varlen kernel: no operator and no shape follows from a row's segments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmpack.attention.blocks import BlockMasks
from vlmpack.attention.segments import dense_attention
from vlmpack.packing.batch import PackedSeqParams


def boundary_attention(
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
    """Attention inside each segment of a THD row, never across; arguments and result as
    `segment_attention`.

    Raises:
        ValueError: masks of image blocks, or segments that go on from others.
    """
    if params.forks is not None or masks is not None:
        raise ValueError("boundaries alone say nothing of forks and of image blocks")
    slots = torch.arange(query.shape[0], dtype=torch.int32, device=query.device)
    # A boundary that repeats the last one owns no slot.
    segment = torch.searchsorted(params.cu_seqlens_physical[1:], slots, right=True)
    seen = segment[:, None] == segment
    behind = slots[:, None] - slots
    if causal:
        seen = seen & (behind >= 0)
    if window is not None:
        seen = seen & (behind.abs() < window)
    q, k, v = (part.transpose(0, 1)[None] for part in (query, key, value))
    output = dense_attention(q, k, v, mask=seen, causal=causal, scale=scale)
    return output[0].transpose(0, 1)
