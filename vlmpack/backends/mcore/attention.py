"""Core attention of Megatron's layers for THD rows, with RoPE inside.

Megatron passes queries and keys unrotated (`position_embedding_type="none"`). cos and sin of this
rank's tokens travel with the packed-sequence params, built once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams as MegatronPackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from vlmpack.attention import VarlenAttention, apply_rope, segment_attention
from vlmpack.backends.collectives import gather_slices, heads_to_slots, slots_to_heads
from vlmpack.backends.fused import Rotate
from vlmpack.errors import CapabilityError
from vlmpack.kernel_operators import is_plain
from vlmpack.packing import ContextSlice, PackedSeqParams
from vlmpack.recurrence import RowSegments


@dataclass
class RowParams(MegatronPackedSeqParams):
    """Megatron's params of one row, and what our attention needs besides.

    Args:
        row: the boundaries of the whole row, host integers included.
        cos: (T / CP, R / 2) float32, of this rank's tokens. With `rotate` (1, T / CP, R), as
            kernels read them. R columns of a head are rotated, and R may be 0.
        sin: the same.
        context: this rank's slice; None where rows are whole, and in a captured graph.
        natural_order: of the ranks' slices, see `ContextSlice`; None where rows are whole.
        replayed: what captured parts read of the row besides boundaries; None without a capture.
        pad_between_seqs: for Transformer Engine, which would otherwise look for gaps in every
            layer. An alignment gap counts as its segment's tail here, so there are none.
    """

    row: PackedSeqParams | None = None
    segments: RowSegments | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    context: ContextSlice | None = None
    natural_order: Tensor | None = None
    replayed: Mapping[str, Tensor] | None = None
    deep: tuple[Tensor, ...] = ()
    pad_between_seqs: bool = False
    rotate: Rotate | None = None

    def rotated(self, query: Tensor, key: Tensor) -> list[Tensor]:
        """Queries and keys, (T / CP, H, D), at their tokens' positions."""
        assert self.cos is not None and self.sin is not None
        if not self.cos.shape[-1]:  # attention without positions
            return [query, key]
        if self.rotate is not None:
            return [x.squeeze(0) for x in self.rotate((query[None], key[None]), self.cos, self.sin)]
        width = 2 * self.cos.shape[-1]
        if width == query.shape[-1]:
            return apply_rope((query, key), self.cos, self.sin)
        turned = apply_rope((query[..., :width], key[..., :width]), self.cos, self.sin)
        unturned = (query[..., width:], key[..., width:])
        return [torch.cat(parts, dim=-1) for parts in zip(turned, unturned, strict=True)]


def megatron_params(
    params: PackedSeqParams,
    *,
    cos: Tensor,
    sin: Tensor,
    context: ContextSlice | None,
    deep: tuple[Tensor, ...],
    rotate: Rotate | None = None,
    width: int | None = None,
    natural_order: Tensor | None = None,
) -> RowParams:
    """Our params in Megatron's class: one tensor of physical boundaries for all four of its fields.

    Gaps come last in their segments, so causal attention over physical boundaries is exact for
    every real token. With logical boundaries Transformer Engine up to 2.17 drops real keys under
    context parallelism where the row's only gap follows its last sample (TransformerEngine#3331).
    It also compares boundaries on the host in every layer, and without padded ones its ring refuses
    the row. Newer versions see that there are no gaps because the four fields are one object.

    Args:
        cos: (T / CP, R / 2).
        sin: the same.
        rotate: rotates as one kernel, for which whole heads' angles are made here once for all
            layers.
        width: T; None for the sum of the segments' lengths, which a captured graph does not know.
        natural_order: given instead of `context` in a captured graph.

    Raises:
        CapabilityError: segments that continue others.
    """
    if params.prefix_tree is not None:
        raise CapabilityError(
            "this row holds a shared prefix once (packing.share_prefix), which attention on this "
            "engine cannot run. Use model.backend: hf"
        )
    cu_seqlens = params.cu_seqlens_physical
    if rotate is not None:
        cos, sin = (torch.cat((part, part), dim=-1)[None] for part in (cos, sin))
    return RowParams(
        qkv_format=params.qkv_format,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=params.max_seqlen_q,
        max_seqlen_kv=params.max_seqlen_kv,
        row=params,
        segments=RowSegments(params.segment_lengths, cu_seqlens, width=width),
        cos=cos,
        sin=sin,
        context=context,
        natural_order=natural_order if context is None else context.natural_order,
        deep=deep,
        rotate=rotate,
    )


class PackedCoreAttention(MegatronModule):
    """Causal attention inside each segment; what Megatron's layer spec calls `core_attention`.

    Args:
        layer_number: counted from 1.
        softmax_scale: factor on the scores; 1 / sqrt(D) if None.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *,
        varlen: VarlenAttention,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.varlen = varlen
        self.softmax_scale = softmax_scale
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: RowParams,
        **_: Any,
    ) -> Tensor:
        """(T', Hq, D), (T', Hkv, D), (T', Hkv, D) -> (T', Hq * D), T' = T / CP.

        Raises:
            ValueError: a mask, or params that are not ours: samples would mix.
        """
        if attention_mask is not None or not isinstance(packed_seq_params, RowParams):
            raise ValueError("packed rows need RowParams and no attention mask")
        query, key = packed_seq_params.rotated(query, key)
        row, context = packed_seq_params.row, packed_seq_params.context
        order = packed_seq_params.natural_order
        assert row is not None
        if context is None and order is not None:
            attend = partial(self.varlen, params=row, scale=self.softmax_scale)
            output = attention_by_heads(query, key, value, attend, order, group=self.cp_group)
        elif context is None:
            varlen = segment_attention if is_plain() else self.varlen
            output = varlen(query, key, value, row, scale=self.softmax_scale)
        else:
            output = context_parallel_attention(
                query,
                key,
                value,
                row.segment_lengths,
                context,
                group=self.cp_group,
                scale=self.softmax_scale,
            )
        return output.flatten(1)


def attention_by_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    natural_order: Tensor,
    *,
    group: dist.ProcessGroup,
) -> Tensor:
    """Attention of whole rows, for this rank's part of the heads.

    Only `attend` depends on segments, by the boundaries that it reads, so a graph can record it.
    Queries are exchanged for heads, and back. Keys and values are exchanged too where they have as
    many heads. Fewer are gathered, and each rank takes those of its queries.

    Args:
        query: (T / CP, Hq, D), this rank's slice.
        key: (T / CP, Hkv, D).
        value: (T / CP, Hkv, D).
        natural_order: (T,) int64, see `ContextSlice`.

    Returns:
        (T / CP, Hq, D).
    """
    size, groups, width = group.size(), key.shape[1], query.shape[-1]
    if groups % size == 0:
        flat = [part.flatten(1) for part in (query, key, value)]
        whole = slots_to_heads(flat, natural_order, group=group)
        queries, keys, values = (part.unflatten(-1, (-1, width)) for part in whole)
    else:
        (flat_queries,) = slots_to_heads([query.flatten(1)], natural_order, group=group)
        queries = flat_queries.unflatten(-1, (-1, width))
        both = gather_slices(torch.stack((key, value), dim=1), natural_order, group)
        head = group.rank() * queries.shape[1] * groups // query.shape[1]
        keys, values = both[:, 0, head : head + 1], both[:, 1, head : head + 1]
    attended = attend(queries, keys.contiguous(), values.contiguous())
    slots = heads_to_slots(attended.flatten(1), natural_order, group=group)
    output: Tensor = slots.unflatten(-1, (-1, width))
    return output


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: tuple[int, ...],
    context: ContextSlice,
    *,
    group: dist.ProcessGroup,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of this rank's queries to the keys of the whole row.

    Keys and values, which have few heads under grouped-query attention, are gathered over the CP
    ranks in one collective. Queries stay. A rank holds two chunks of each segment. Each chunk
    attends to the segment from its start to the chunk's end.

    Args:
        query: (T / CP, Hq, D), this rank's slice.
        key: (T / CP, Hkv, D).
        value: (T / CP, Hkv, D).
        segment_lengths: physical lengths of the whole row's segments, multiples of 2 * CP.
        scale: factor on the scores; 1 / sqrt(D) if None.

    Returns:
        (T / CP, Hq, D).
    """
    both = gather_slices(torch.stack((key, value), dim=1), context.natural_order, group)
    runs = [(length, len(list(run))) for length, run in groupby(segment_lengths) if length]
    # Split, not sliced: the backward of every slice would fill a whole row with zeros.
    own = query.split([count * length // context.size for length, count in runs])
    whole = both.split([count * length for length, count in runs])
    outputs: list[Tensor] = []
    for (length, count), queries, keys_values in zip(runs, own, whole, strict=True):
        chunk = length // (2 * context.size)
        queries = queries.view(count, 2, chunk, *query.shape[1:])
        keys_values = keys_values.view(count, length, *both.shape[1:])
        halves = [
            _chunk_attention(queries[:, half], keys_values[:, : (which + 1) * chunk], scale=scale)
            for half, which in enumerate((context.rank, 2 * context.size - 1 - context.rank))
        ]
        outputs.append(torch.stack(halves, dim=1).flatten(0, 2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _chunk_attention(query: Tensor, keys_values: Tensor, *, scale: float | None) -> Tensor:
    """Causal attention of queries that come last among their keys.

    (n, c, Hq, D), (n, k, 2, Hkv, D) -> (n, c, Hq, D). No (c, k) mask outlives the call. CUDA
    kernels align causality at the end themselves, and on CPU the mask is made again in backward.
    """
    num_queries, num_keys = query.shape[1], keys_values.shape[1]
    if num_queries == num_keys:
        return _attend(query, keys_values, None, scale)
    if query.is_cuda:
        return _attend(query, keys_values, causal_lower_right(num_queries, num_keys), scale)
    output: Tensor = checkpoint(
        _attend_masked, query, keys_values, scale, use_reentrant=False, preserve_rng_state=False
    )
    return output


def _attend_masked(query: Tensor, keys_values: Tensor, scale: float | None) -> Tensor:
    num_queries, num_keys = query.shape[1], keys_values.shape[1]
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
    return _attend(query, keys_values, mask.tril(num_keys - num_queries), scale)


def _attend(query: Tensor, keys_values: Tensor, mask: Any, scale: float | None) -> Tensor:
    output = scaled_dot_product_attention(
        query.transpose(1, 2),
        keys_values[:, :, 0].transpose(1, 2),
        keys_values[:, :, 1].transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[2] != keys_values.shape[3],
    )
    return output.transpose(1, 2)
