"""Collectives whose backward passes Megatron's mappings do not have: two gathers, an exchange of
slots for heads, and a sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class _GatherSlices(torch.autograd.Function):
    """Slices of all context-parallel ranks, in the row's order; backward sums and slices."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, natural_order: Tensor, group: Any) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(natural_order)
        local = local.contiguous()
        gathered = local.new_empty(local.shape[0] * group.size(), *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local, group=group)
        return gathered.index_select(0, natural_order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (natural_order,) = ctx.saved_tensors
        by_rank = torch.empty_like(grads[0]).index_copy_(0, natural_order, grads[0])
        rows = by_rank.shape[0] // ctx.group.size()
        local = by_rank.new_empty(rows, *by_rank.shape[1:])
        dist.reduce_scatter_tensor(local, by_rank, group=ctx.group)
        return local, None, None


def gather_slices(local: Tensor, natural_order: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All tokens of a row on every context-parallel rank.

    Args:
        local: (T / CP, ...), this rank's slice.
        natural_order: (T,) int64, see `ContextSlice`.

    Returns:
        (T, ...) in the row's order. The gradient of a slice is the sum of what all ranks send back.
    """
    gathered: Tensor = _GatherSlices.apply(local, natural_order, group)  # type: ignore[no-untyped-call]
    return gathered


class _GatherFeatures(torch.autograd.Function):
    """Features of all ranks' images, in image order; backward returns each rank its own."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, order: Tensor, counts: Sequence[int], group: Any, cp_group: Any
    ) -> Tensor:
        ctx.mine = local.shape[0]
        ctx.counts, ctx.group, ctx.cp_group = counts, group, cp_group
        ctx.save_for_backward(order)
        widest = max(counts)
        padded = local.new_zeros(widest, local.shape[1])
        padded[: local.shape[0]] = local
        gathered = local.new_empty(widest * group.size(), local.shape[1])
        dist.all_gather_into_tensor(gathered, padded, group=group)
        ctx.widest = widest
        return gathered.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None, None]:
        (order,) = ctx.saved_tensors
        gradient = grads[0].contiguous()
        if ctx.cp_group.size() > 1:  # each CP rank saw the features of its own tokens alone
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=ctx.cp_group)
        by_rank = gradient.new_zeros(ctx.widest * ctx.group.size(), gradient.shape[1])
        by_rank.index_copy_(0, order, gradient)
        start = ctx.group.rank() * ctx.widest
        return by_rank[start : start + ctx.mine], None, None, None, None


def gather_features(
    local: Tensor,
    order: Tensor,
    counts: Sequence[int],
    *,
    group: dist.ProcessGroup,
    cp_group: dist.ProcessGroup,
) -> Tensor:
    """The features of all images from the ranks that computed them.

    Args:
        local: (m, D), the features of this rank's images, one image after the other.
        order: (M,) int64, where each feature of the row lies in the ranks' outputs, each padded to
            the largest of `counts`.
        counts: features by rank; the same on every rank.
        group: the TP x CP ranks that share the work.
        cp_group: the CP ranks among them. TP ranks all hold the whole gradient of the features. CP
            ranks hold that of their own tokens, which is summed.

    Returns:
        (M, D) in the row's order.
    """
    gathered: Tensor = _GatherFeatures.apply(  # type: ignore[no-untyped-call]
        local, order, tuple(counts), group, cp_group
    )
    return gathered


class _Exchange(torch.autograd.Function):
    """(T / CP, CP, C) to (T, C): every rank gets all slots of its own part of the channels.

    Or the way back, which is the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, group: Any, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        ctx.save_for_backward(order)
        return (_to_heads if to_heads else _to_slots)(x, order, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        back = _to_slots if ctx.to_heads else _to_heads
        return back(grads[0], order, ctx.group), None, None, None


def _to_heads(local: Tensor, natural_order: Tensor, group: Any) -> Tensor:
    sent = local.transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.flatten(0, 1).index_select(0, natural_order)


def _to_slots(whole: Tensor, natural_order: Tensor, group: Any) -> Tensor:
    by_rank = torch.empty_like(whole, memory_format=torch.contiguous_format)
    sent = by_rank.index_copy_(0, natural_order, whole).unflatten(0, (group.size(), -1))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.transpose(0, 1)


def slots_to_heads(
    parts: Sequence[Tensor], natural_order: Tensor, *, group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """The whole row for this rank's part of the heads, from this rank's slots of all heads.

    Args:
        parts: (T / CP, C) each, channels by heads; each rank takes equally many heads, in order.
        natural_order: (T,) int64, see `ContextSlice`.

    Returns:
        (T, C / CP) each, in the row's order.
    """
    ranks = group.size()
    together = torch.cat([part.unflatten(-1, (ranks, -1)) for part in parts], dim=-1)
    whole: Tensor = _Exchange.apply(together, natural_order, group, True)  # type: ignore[no-untyped-call]
    widths = [part.shape[-1] // ranks for part in parts]
    return tuple(whole.split(widths, dim=-1))


def heads_to_slots(whole: Tensor, natural_order: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """This rank's slots of all heads, (T / CP, C), from the whole row of its part of them,
    (T, C / CP)."""
    local: Tensor = _Exchange.apply(whole, natural_order, group, False)  # type: ignore[no-untyped-call]
    return local.flatten(1)


class _SumParts(torch.autograd.Function):
    """The sum over ranks; backward is the identity, since each rank differentiates its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        total = part.clone()
        if total.numel():  # as many on every rank: those of a row without samples are none
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0], None


def sum_parts(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum values of which each rank has its tokens' part.

    Every rank then computes the same function of the sums, and sends its gradient through its own
    part alone. The gradients of weights are added up over the ranks, as those of token losses are.
    So the factor of each token is 1 at any number of ranks.

    Args:
        part: of any shape, the same on every rank.
    """
    total: Tensor = _SumParts.apply(part, group)  # type: ignore[no-untyped-call]
    return total
