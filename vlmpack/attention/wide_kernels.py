"""Triton's kernels of causal attention in packed rows, for heads that others are too narrow for.

Imported only where a kernel is launched, because Triton comes with torch's builds for CUDA alone.
`wide.py` has the formulas. A program reads a tile of whole heads and walks over tiles of what that
tile sees (FlashAttention 2, 2307.08691). It finds the ends of segments in `cu_seqlens` by itself,
so neither its grid nor any shape depends on how long they are, and a graph can capture it. Sums are
float32. Each gradient is summed by one program in one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
BOUNDS = tl.constexpr(32)
"""Boundaries that a program looks at together."""
IEEE = tl.constexpr("ieee")
"""How float32 is multiplied, in place of TF32. It changes nothing for narrower types."""
WARPS = 8
TILE = {"queries": 32, "keys": 32}
"""Slots that a program multiplies at a time. Larger tiles of heads of 512 spill registers, and four
of them must fit the 163 KiB of shared memory that sm_80 has."""
TILE_OF_KEYS = {"queries": 16, "keys": 32}
"""The same of the gradients of keys and values, of which a program sums both."""


@triton.jit
def _ends(cu, bounds, slot, slots):
    """First slot of each slot's segment, and the slot behind its last."""
    start, stop = slot * 0, slot * 0 + slots
    for at in range(0, bounds, BOUNDS):
        place = at + tl.arange(0, BOUNDS)
        bound = tl.load(cu + place, mask=place < bounds, other=slots)[None, :]
        start = tl.maximum(start, tl.max(tl.where(bound <= slot[:, None], bound, 0), axis=1))
        stop = tl.minimum(stop, tl.min(tl.where(bound > slot[:, None], bound, slots), axis=1))
    return start, stop


@triton.jit
def _places(head, heads, slot, slots, width: tl.constexpr, wide: tl.constexpr):
    """Where one head of these slots lies in a contiguous (T, H, D), and what of it is there."""
    column = tl.arange(0, wide)[None, :]
    place = (slot.to(tl.int64)[:, None] * heads + head) * width + column
    return place, (slot < slots)[:, None] & (column < width)


@triton.jit
def _tile(whole, head, heads, slot, slots, width: tl.constexpr, wide: tl.constexpr):
    """(N, wide), zeros beyond the row and beyond the head."""
    place, is_there = _places(head, heads, slot, slots, width, wide)
    return tl.load(whole + place, mask=is_there, other=0.0)


@triton.jit
def _keep(whole, made, head, heads, slot, slots, width: tl.constexpr, wide: tl.constexpr):
    """Store such a tile."""
    place, is_there = _places(head, heads, slot, slots, width, wide)
    tl.store(whole + place, made.to(whole.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["slots", "bounds"])
def wide_forward(
    q,
    k,
    v,
    cu,
    out,
    lse,
    slots,
    bounds,
    scale,
    groups: tl.constexpr,
    width: tl.constexpr,
    wide: tl.constexpr,
    queries: tl.constexpr,
    keys: tl.constexpr,
):
    """`queries` slots of one head in a program."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    first = tl.program_id(0) * queries
    slot = first + tl.arange(0, queries)
    start, _ = _ends(cu, bounds, slot, slots)
    q_tile = _tile(q, head, heads, slot, slots, width, wide)
    made = tl.zeros((queries, wide), dtype=tl.float32)
    peak = tl.full((queries,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((queries,), dtype=tl.float32)
    stop = tl.minimum(first + queries, slots)
    for at in range(tl.min(start), stop, keys):
        key = at + tl.arange(0, keys)
        k_tile = _tile(k, head // groups, heads // groups, key, slots, width, wide)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=IEEE) * (scale * LOG2_E)
        seen = (key[None, :] >= start[:, None]) & (key[None, :] <= slot[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        weights, rest = tl.exp2(scores - base[:, None]), tl.exp2(peak - base)
        v_tile = _tile(v, head // groups, heads // groups, key, slots, width, wide)
        made = made * rest[:, None]
        made = tl.dot(weights.to(v_tile.dtype), v_tile, made, input_precision=IEEE)
        total = total * rest + tl.sum(weights, axis=1)
        peak = higher
    total = tl.where(total == 0.0, 1.0, total)  # of slots beyond the row
    _keep(out, made / total[:, None], head, heads, slot, slots, width, wide)
    sums = (peak + tl.log2(total)) / LOG2_E
    tl.store(lse + head * slots + slot, sums, mask=slot < slots)


@triton.jit(do_not_specialize=["slots", "bounds"])
def wide_backward_queries(
    grad,
    q,
    k,
    v,
    cu,
    out,
    lse,
    q_grad,
    along,
    slots,
    bounds,
    scale,
    groups: tl.constexpr,
    width: tl.constexpr,
    wide: tl.constexpr,
    queries: tl.constexpr,
    keys: tl.constexpr,
):
    """The gradient of `queries` slots of one head, and the part of their scores' gradients that is
    the same for all keys: the sum of output times gradient."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    first = tl.program_id(0) * queries
    slot = first + tl.arange(0, queries)
    start, _ = _ends(cu, bounds, slot, slots)
    grad_tile = _tile(grad, head, heads, slot, slots, width, wide)
    out_tile = _tile(out, head, heads, slot, slots, width, wide)
    same = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), axis=1)
    tl.store(along + head * slots + slot, same, mask=slot < slots)
    q_tile = _tile(q, head, heads, slot, slots, width, wide)
    sums = tl.load(lse + head * slots + slot, mask=slot < slots, other=0.0) * LOG2_E
    made = tl.zeros((queries, wide), dtype=tl.float32)
    stop = tl.minimum(first + queries, slots)
    for at in range(tl.min(start), stop, keys):
        key = at + tl.arange(0, keys)
        k_tile = _tile(k, head // groups, heads // groups, key, slots, width, wide)
        v_tile = _tile(v, head // groups, heads // groups, key, slots, width, wide)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=IEEE) * (scale * LOG2_E)
        seen = (key[None, :] >= start[:, None]) & (key[None, :] <= slot[:, None])
        weights = tl.where(seen, tl.exp2(scores - sums[:, None]), 0.0)
        slope = tl.dot(grad_tile, tl.trans(v_tile), input_precision=IEEE) - same[:, None]
        slope = (weights * slope).to(k_tile.dtype)
        made = tl.dot(slope, k_tile, made, input_precision=IEEE)
    _keep(q_grad, made * scale, head, heads, slot, slots, width, wide)


@triton.jit(do_not_specialize=["slots", "bounds"])
def wide_backward_keys(
    grad,
    q,
    k,
    v,
    cu,
    lse,
    along,
    k_grad,
    v_grad,
    slots,
    bounds,
    scale,
    groups: tl.constexpr,
    width: tl.constexpr,
    wide: tl.constexpr,
    queries: tl.constexpr,
    keys: tl.constexpr,
):
    """Gradients of `keys` slots of one head of keys and values, over all queries that see them."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    first = tl.program_id(0) * keys
    key = first + tl.arange(0, keys)
    _, stop = _ends(cu, bounds, key, slots)
    last = tl.max(tl.where(key < slots, stop, 0))
    k_tile = _tile(k, head, heads, key, slots, width, wide)
    v_tile = _tile(v, head, heads, key, slots, width, wide)
    k_made = tl.zeros((keys, wide), dtype=tl.float32)
    v_made = tl.zeros((keys, wide), dtype=tl.float32)
    for group in range(groups):
        of = head * groups + group
        for at in range(first, last, queries):
            slot = at + tl.arange(0, queries)
            q_tile = _tile(q, of, heads * groups, slot, slots, width, wide)
            grad_tile = _tile(grad, of, heads * groups, slot, slots, width, wide)
            inside = slot < slots
            sums = tl.load(lse + of * slots + slot, mask=inside, other=0.0) * LOG2_E
            same = tl.load(along + of * slots + slot, mask=inside, other=0.0)
            scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=IEEE) * (scale * LOG2_E)
            seen = (slot[None, :] >= key[:, None]) & (slot[None, :] < stop[:, None])
            weights = tl.where(seen, tl.exp2(scores - sums[None, :]), 0.0)
            v_made = tl.dot(weights.to(q_tile.dtype), grad_tile, v_made, input_precision=IEEE)
            slope = tl.dot(v_tile, tl.trans(grad_tile), input_precision=IEEE) - same[None, :]
            slope = (weights * slope).to(q_tile.dtype)
            k_made = tl.dot(slope, q_tile, k_made, input_precision=IEEE)
    _keep(k_grad, k_made * scale, head, heads, key, slots, width, wide)
    _keep(v_grad, v_made, head, heads, key, slots, width, wide)


def form_of(width: int, groups: int) -> dict[str, int]:
    """What a kernel is compiled with, for heads of `width` channels of which `groups` of queries
    share one of keys."""
    sizes = {"width": width, "wide": max(triton.next_power_of_2(width), 16)}
    return {"groups": groups, **sizes, **TILE, "num_warps": WARPS, "num_stages": 1}


def launch_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See `wide.attention_formula`."""
    slots, heads, width = q.shape
    q, k, v = (x.contiguous() for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, slots), dtype=torch.float32, device=q.device)
    form = form_of(width, heads // k.shape[1])
    if slots:
        given = (q, k, v, cu_seqlens, out, lse, slots, len(cu_seqlens), scale)
        wide_forward[(triton.cdiv(slots, form["queries"]), heads)](*given, **form)
    return out, lse


def launch_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `wide.attention_backward_formula`."""
    slots, heads, width = q.shape
    grad, q, k, v = (x.contiguous() for x in (grad, q, k, v))
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    along = torch.empty_like(lse)
    form = form_of(width, heads // k.shape[1])
    of_keys = form | TILE_OF_KEYS
    if slots:
        given, sizes = (grad, q, k, v, cu_seqlens), (slots, len(cu_seqlens), scale)
        wide_backward_queries[(triton.cdiv(slots, form["queries"]), heads)](
            *given, out, lse, grads[0], along, *sizes, **form
        )
        wide_backward_keys[(triton.cdiv(slots, of_keys["keys"]), k.shape[1])](
            *given, lse, along, *grads[1:], *sizes, **of_keys
        )
    return grads[0], grads[1], grads[2]
