"""Varlen attention as one scaled_dot_product_attention call per run of equal segments.

Works on any device and in any dtype; on CPU it is the fastest exact form there is (a
block-diagonal mask computes T x T scores, nested tensors have no causal kernel).
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vlmpack.packing.batch import PackedSeqParams


def _window_mask(length: int, window: int, causal: bool, device: torch.device) -> Tensor:
    """(length, length) bool: True where |q - k| < window, and k <= q if causal."""
    index = torch.arange(length, device=device)
    distance = index[:, None] - index[None, :]
    inside = distance < window
    return inside & (distance >= 0) if causal else inside & (distance > -window)


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: PackedSeqParams,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention inside each segment of a THD row, never across.

    Runs of segments of one length share a call: they are a view, (run, length, heads, width).

    Args:
        query: (T, Hq, D).
        key: (T, Hkv, D); Hq is a multiple of Hkv (grouped-query attention).
        value: (T, Hkv, D).
        params: the boundaries; physical segments are used, which is exact for causal attention
            because no real token attends to the gap after it.
        causal: whether a token sees only itself and what came before it in its segment.
        scale: factor on the scores; 1 / sqrt(D) if None.
        window: sliding window in tokens, the token itself included; None for the whole segment.

    Returns:
        (T, Hq, D).

    Raises:
        ValueError: bidirectional attention over segments that have alignment gaps.
    """
    if not causal and params.cu_seqlens_q_padded is not None:
        raise ValueError("bidirectional attention needs segments without alignment gaps")
    grouped = query.shape[1] != key.shape[1]
    outputs: list[Tensor] = []
    start = 0
    for length, run in groupby(params.segment_lengths):
        count = len(list(run))
        if length == 0:
            continue
        stop = start + count * length
        q, k, v = (
            part[start:stop].view(count, length, *part.shape[1:]).transpose(1, 2)
            for part in (query, key, value)
        )
        mask = None
        if window is not None and window < length:
            mask = _window_mask(length, window, causal, query.device)
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal and mask is None,
            scale=scale,
            enable_gqa=grouped,
        )
        outputs.append(out.transpose(1, 2).reshape(count * length, *query.shape[1:]))
        start = stop
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
