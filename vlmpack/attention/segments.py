"""Varlen attention as one scaled_dot_product_attention call per run of equal segments.

Works on any device and in any dtype; on CPU it is the fastest exact form there is (a
block-diagonal mask computes T x T scores, nested tensors have no causal kernel).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vlmpack.attention.blocks import BlockMasks
from vlmpack.packing.batch import PackedSeqParams


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """(length, length) bool: True where |q - k| < window; None where that is everywhere."""
    if window is None or window >= length:
        return None
    everywhere = torch.ones(length, length, dtype=torch.bool, device=device)
    return everywhere.tril_(window - 1).triu_(1 - window)


def segment_attention(
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
    """Attention inside each segment of a THD row, never across.

    Runs of segments of one length share a call: they are a view, (run, length, heads, width).
    Bidirectional segments of one length share it wherever they lie: a vision tower has many short
    ones, the attention windows of its images.

    Args:
        query: (T, Hq, D).
        key: (T, Hkv, D); Hq is a multiple of Hkv (grouped-query attention).
        value: (T, Hkv, D).
        params: the boundaries; physical segments are used, which is exact for causal attention
            because no real token attends to the gap after it.
        causal: whether a token sees only itself and what came before it in its segment.
        scale: factor on the scores; 1 / sqrt(D) if None.
        window: sliding window in tokens, the token itself included; None for the whole segment.
        masks: which stretches of the segments attend in both directions; None for none. Segments
            without one keep the causal kernel.

    Returns:
        (T, Hq, D).

    Raises:
        ValueError: bidirectional attention over segments that have alignment gaps, or with `masks`;
            masks of other segments; segments that go on from others.
    """
    if params.forks is not None:
        raise ValueError("segments that go on from others need fork_attention")
    if masks is not None and (not causal or masks.lengths != params.segment_lengths):
        raise ValueError("masks of image blocks go with causal attention over the same segments")
    if not causal and params.cu_seqlens_q_padded is not None:
        raise ValueError("bidirectional attention needs segments without alignment gaps")
    if not causal:
        return _bidirectional(query, key, value, params.segment_lengths, scale, window)
    if masks is None:
        masks = BlockMasks(params.segment_lengths, (), query.device)
    runs = [
        (length, inside, len(list(run)))
        for (length, inside), run in groupby(zip(masks.lengths, masks.of_segment, strict=True))
        if length
    ]
    # Split, not sliced: the backward of every slice would fill a whole row with zeros.
    sizes = [count * length for length, _, count in runs]
    parts = zip(*(whole.split(sizes) for whole in (query, key, value)), strict=True)
    outputs: list[Tensor] = []
    for (length, inside, count), qkv in zip(runs, parts, strict=True):
        q, k, v = (part.view(count, length, *part.shape[1:]).transpose(1, 2) for part in qkv)
        mask = masks.mask(length, inside, window)
        out = dense_attention(q, k, v, mask=mask, causal=True, scale=scale)
        outputs.append(out.transpose(1, 2).reshape(count * length, *query.shape[1:]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _bidirectional(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    scale: float | None,
    window: int | None,
) -> Tensor:
    """(T, Hq, D): each segment sees itself; one call for each length that there is."""
    runs = [(length, len(list(run))) for length, run in groupby(lengths) if length]
    pieces = [
        whole.split([length * count for length, count in runs]) for whole in (query, key, value)
    ]
    places: dict[int, list[int]] = {}
    for place, (length, _) in enumerate(runs):
        places.setdefault(length, []).append(place)
    outputs: dict[int, Tensor] = {}
    for length, same in places.items():
        qkv = [
            own[same[0]] if len(same) == 1 else torch.cat([own[n] for n in same]) for own in pieces
        ]
        q, k, v = (part.view(-1, length, *part.shape[1:]).transpose(1, 2) for part in qkv)
        mask = _band(length, window, query.device)
        out = dense_attention(q, k, v, mask=mask, causal=False, scale=scale)
        flat = out.transpose(1, 2).reshape(-1, *query.shape[1:])
        outputs.update(zip(same, flat.split([length * runs[n][1] for n in same]), strict=True))
    return torch.cat([outputs[place] for place in range(len(runs))])


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """`scaled_dot_product_attention` with grouped queries.

    Keys and values are repeated where there is a mask: of the CUDA kernels that take one, only that
    which stores all scores has a grouped-query form.

    Args:
        query: (B, Hq, S, D).
        key: (B, Hkv, S, D).
        value: (B, Hkv, S, D).
        mask: bool, True where a query sees a key, as broadcasts to (B, Hq, S, S); or None.
        causal: without a mask, whether a token sees nothing behind it.
        scale: factor on the scores; 1 / sqrt(D) if None.

    Returns:
        (B, Hq, S, D).
    """
    groups = query.shape[1] // key.shape[1]
    if mask is not None and groups > 1:
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=mask is None and groups > 1,
    )
