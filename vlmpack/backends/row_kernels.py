"""Triton's kernels of RMS norms and rotations, and how they are launched.

Imported only where a kernel is launched, because Triton comes with torch's builds for CUDA alone.
`vlmpack/backends/row_operators.py` has the formulas. Numbers are float32 inside a kernel, whatever
its tensors have, and are rounded once where they are stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmpack.backends.row_operators import WIDEST

ELEMENTS = 1024
"""Numbers that a program holds at a time, of several rows where these are narrow."""
EACH = 512
"""Numbers of a warp: 16 of a thread."""
PROGRAMS = 4
"""Programs of a backward pass on each multiprocessor. Each sums the weight's gradient of its rows
by itself, and the sums of all are added in one order."""


@triton.jit(do_not_specialize=["rows"])
def norm_forward(
    x,
    weight,
    out,
    scales,
    rows,
    x_stride,
    eps,
    offset,
    rounds_first: tl.constexpr,
    width: tl.constexpr,
    at_once: tl.constexpr,
    wide: tl.constexpr,
):
    """Rows of `width` columns, `at_once` of them in a program."""
    row = (tl.program_id(0).to(tl.int64) * at_once + tl.arange(0, at_once))[:, None]
    column = tl.arange(0, wide)[None, :]
    inside = (row < rows) & (column < width)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / width + eps)[:, None]
    normed = value * scale
    if rounds_first:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    made = (normed * factor).to(out.dtype.element_ty)
    tl.store(out + row * width + column, made, mask=inside)
    tl.store(scales + row, scale, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "turns"])
def norm_backward(
    grad,
    x,
    weight,
    scales,
    x_grad,
    weight_sums,
    rows,
    turns,
    grad_stride,
    x_stride,
    offset,
    rounds_first: tl.constexpr,
    learns: tl.constexpr,
    width: tl.constexpr,
    at_once: tl.constexpr,
    wide: tl.constexpr,
):
    """Gradients of rows, `at_once` of them in each of a program's turns, and with `learns` the sums
    of the weight's gradient over all rows of a program."""
    column = tl.arange(0, wide)[None, :]
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    total = tl.zeros((at_once, wide), dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * turns * at_once
    for turn in range(turns):
        row = (first + turn * at_once + tl.arange(0, at_once))[:, None]
        inside = (row < rows) & (column < width)
        value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)
        normed = value * scale
        slope = given * factor
        along = (tl.sum(slope * normed, axis=1) / width)[:, None]
        made = (scale * (slope - normed * along)).to(x_grad.dtype.element_ty)
        tl.store(x_grad + row * width + column, made, mask=inside)
        if learns:
            if rounds_first:
                normed = normed.to(x.dtype.element_ty).to(tl.float32)
            total += given * normed
    if learns:
        summed = tl.sum(total, axis=0)[None, :]
        tl.store(weight_sums + tl.program_id(0) * width + column, summed, mask=column < width)


def _tile(width: int) -> tuple[int, dict[str, int]]:
    """Rows that a program holds at a time, and what its kernel is compiled with."""
    assert width <= WIDEST, f"a row has {width} columns, the kernel takes {WIDEST}"
    wide = triton.next_power_of_2(width)
    held = max(wide, ELEMENTS)
    at_once = held // wide
    return at_once, {
        "width": width,
        "at_once": at_once,
        "wide": wide,
        "num_warps": held // EACH,
    }


def _rows_of(x: Tensor) -> Tensor:
    """(..., D) -> (N, D) with neighbouring columns, a view where there is one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def launch_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `row_operators.norm_formula`."""
    rows = _rows_of(x)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if rows.numel():
        at_once, form = _tile(x.shape[-1])
        grid = (triton.cdiv(len(rows), at_once),)
        given = (rows, weight.contiguous(), out, scales)
        sizes = (len(rows), rows.stride(0), eps, offset)
        norm_forward[grid](*given, *sizes, rounds_first=rounds_first, **form)
    return out, scales


def launch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    offset: float,
    rounds_first: bool,
    learns: bool,
) -> tuple[Tensor, Tensor]:
    """See `row_operators.norm_backward_formula`."""
    rows, grads = _rows_of(x), _rows_of(grad)
    x_grad = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    at_once, form = _tile(x.shape[-1])
    tiles = triton.cdiv(len(rows), at_once)
    most = PROGRAMS * torch.cuda.get_device_properties(x.device).multi_processor_count
    turns = triton.cdiv(tiles, most)
    programs = triton.cdiv(tiles, turns) if tiles else 0
    sums = torch.empty(programs * learns, x.shape[-1], dtype=torch.float32, device=x.device)
    if rows.numel():
        given = (grads, rows, weight.contiguous(), scales, x_grad, sums)
        sizes = (len(rows), turns, grads.stride(0), rows.stride(0), offset)
        flags = {"rounds_first": rounds_first, "learns": learns}
        norm_backward[(programs,)](*given, *sizes, **flags, **form)
    return x_grad, sums.sum(0).to(weight.dtype) if learns else weight.new_empty(0)


@triton.jit(do_not_specialize=["tokens", "q_heads", "k_heads"])
def rotation(
    q,
    k,
    cos,
    sin,
    q_out,
    k_out,
    tokens,
    q_heads,
    k_heads,
    q_row,
    q_token,
    q_head,
    k_row,
    k_token,
    k_head,
    angle_row,
    angle_token,
    sign,
    half: tl.constexpr,
    rest: tl.constexpr,
    heads: tl.constexpr,
    wide: tl.constexpr,
    tail: tl.constexpr,
):
    """A token's heads in a program, `heads` of them: queries, then keys."""
    place = tl.program_id(0).to(tl.int64)
    row, token = place // tokens, place % tokens
    # Offsets of 64 bits: heads before tokens may lie 2^31 elements apart.
    head = (tl.program_id(1) * heads + tl.arange(0, heads)).to(tl.int64)[:, None]
    column = tl.arange(0, wide)[None, :]
    angles = row * angle_row + token * angle_token + column
    turns = column < half
    c = tl.load(cos + angles, mask=turns, other=0.0).to(tl.float32)
    s = tl.load(sin + angles, mask=turns, other=0.0).to(tl.float32) * sign
    is_q, of_k = head < q_heads, head - q_heads
    is_k = (of_k >= 0) & (of_k < k_heads)
    q += row * q_row + token * q_token + head * q_head
    k += row * k_row + token * k_token + of_k * k_head
    width: tl.constexpr = 2 * half + rest
    q_out += (place * q_heads + head) * width
    k_out += (place * k_heads + of_k) * width
    q_turns, k_turns = is_q & turns, is_k & turns
    first = tl.where(
        is_q,
        tl.load(q + column, mask=q_turns, other=0.0).to(tl.float32),
        tl.load(k + column, mask=k_turns, other=0.0).to(tl.float32),
    )
    second = tl.where(
        is_q,
        tl.load(q + half + column, mask=q_turns, other=0.0).to(tl.float32),
        tl.load(k + half + column, mask=k_turns, other=0.0).to(tl.float32),
    )
    left, right = first * c - second * s, second * c + first * s
    tl.store(q_out + column, left.to(q_out.dtype.element_ty), mask=q_turns)
    tl.store(k_out + column, left.to(k_out.dtype.element_ty), mask=k_turns)
    tl.store(q_out + half + column, right.to(q_out.dtype.element_ty), mask=q_turns)
    tl.store(k_out + half + column, right.to(k_out.dtype.element_ty), mask=k_turns)
    if rest > 0:
        column = 2 * half + tl.arange(0, tail)[None, :]
        of_q, of_k = is_q & (column < width), is_k & (column < width)
        kept = tl.load(q + column, mask=of_q, other=0.0).to(q_out.dtype.element_ty)
        tl.store(q_out + column, kept, mask=of_q)
        kept = tl.load(k + column, mask=of_k, other=0.0).to(k_out.dtype.element_ty)
        tl.store(k_out + column, kept, mask=of_k)


def _head_tile(width: int, turned: int, heads: int) -> dict[str, int]:
    """What the kernel is compiled with, for heads of `width` columns of which some are turned."""
    half, rest = turned // 2, width - turned
    wide, tail = (triton.next_power_of_2(max(each, 1)) for each in (half, rest))
    most = max(1, ELEMENTS // max(wide, tail // 2))
    return {
        "half": half,
        "rest": rest,
        "heads": min(most, triton.next_power_of_2(heads)),
        "wide": wide,
        "tail": tail,
    }


def launch_rotation(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    sign: float,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See `row_operators.rotation_formula`."""
    assert (*q.shape[:2], q.shape[3]) == (*k.shape[:2], k.shape[3]), (q.shape, k.shape)
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(q.shape, dtype=q_dtype, device=q.device)
    other = torch.empty(k.shape, dtype=k_dtype, device=k.device)
    rows, tokens, q_heads, width = q.shape
    every = q_heads + k.shape[2]
    form = _head_tile(width, cos.shape[-1], every)
    if rows * tokens * every:
        angle_row = 0 if len(cos) == 1 else cos.stride(0)
        strides = (*q.stride()[:3], *k.stride()[:3], angle_row, cos.stride(1))
        rotation[(rows * tokens, triton.cdiv(every, form["heads"]))](
            *(q, k, cos, sin, out, other, tokens, q_heads, k.shape[2], *strides, sign), **form
        )
    return out, other
