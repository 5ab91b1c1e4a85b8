"""Triton's kernels of the losses of rows of logits and of their gradients.

Imported only where a kernel is launched, because Triton comes with torch's builds for CUDA alone.
`vlmpack/backends/label_operators.py` has the formulas. Numbers are float32 inside a kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 4096
"""Logits that a program holds at a time."""
WARPS = 8


@triton.jit
def _bent(z, cap, is_capped: tl.constexpr):
    """cap tanh(z / cap), by a form that does not overflow."""
    if is_capped:
        small = tl.exp(-2 * tl.abs(z) / cap)
        bent = cap * (1 - small) / (1 + small)
        return tl.where(z < 0, -bent, bent)
    return z


@triton.jit(do_not_specialize=["row_stride"])
def losses_kernel(
    logits,
    targets,
    losses,
    peaks,
    log_sums,
    temperatures,
    row_stride,
    cap,
    vocabulary: tl.constexpr,
    is_capped: tl.constexpr,
    is_divided: tl.constexpr,
    columns: tl.constexpr,
):
    """One row. Each lane keeps its own largest logit and sum, which are joined at the end."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    lane = tl.arange(0, columns)
    peak = tl.full((columns,), -3.0e38, tl.float32)
    total = tl.zeros((columns,), tl.float32)
    by = tl.load(temperatures + row) if is_divided else 1.0
    for start in range(0, vocabulary, columns):
        inside = start + lane < vocabulary
        z = tl.load(logits + start + lane, mask=inside, other=0.0).to(tl.float32)
        z = _bent(z, cap, is_capped)
        if is_divided:
            z = z / by
        higher = tl.where(inside & (z > peak), z, peak)
        total = total * tl.exp(peak - higher) + tl.where(inside, tl.exp(z - higher), 0.0)
        peak = higher
    top = tl.max(peak, axis=0)
    log_sum = tl.log(tl.sum(total * tl.exp(peak - top), axis=0))
    target = tl.load(targets + row)
    is_one = (target >= 0) & (target < vocabulary)
    picked = tl.load(logits + target, mask=is_one, other=0.0).to(tl.float32)
    picked = _bent(picked, cap, is_capped)
    if is_divided:
        picked = picked / by
    picked = tl.where(is_one, picked, float("nan"))
    tl.store(losses + row, log_sum - (picked - top))
    tl.store(peaks + row, top)
    tl.store(log_sums + row, log_sum)


@triton.jit(do_not_specialize=["row_stride", "grad_stride"])
def gradients_kernel(
    logits,
    targets,
    peaks,
    log_sums,
    grads,
    temperatures,
    row_stride,
    grad_stride,
    cap,
    vocabulary: tl.constexpr,
    is_capped: tl.constexpr,
    is_divided: tl.constexpr,
    columns: tl.constexpr,
):
    """Some columns of one row, over the logits."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < vocabulary
    z = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
    z = _bent(z, cap, is_capped)
    divided = z / tl.load(temperatures + row) if is_divided else z
    made = tl.exp(divided - tl.load(peaks + row) - tl.load(log_sums + row))
    made = tl.where(column == tl.load(targets + row), made - 1, made)
    made *= tl.load(grads + row * grad_stride)
    if is_capped:
        made *= 1 - (z / cap) * (z / cap)
    tl.store(logits + column, made.to(logits.dtype.element_ty), mask=inside)


def _form(logits: Tensor, cap: float, temperatures: Tensor | None) -> dict[str, int]:
    return {
        "vocabulary": logits.shape[1],
        "is_capped": cap > 0,
        "is_divided": temperatures is not None,
        "columns": min(COLUMNS, triton.next_power_of_2(logits.shape[1])),
        "num_warps": WARPS,
    }


def launch_losses(
    logits: Tensor, targets: Tensor, cap: float, temperatures: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `label_operators.losses_formula`. A target that is no column has a loss of NaN."""
    assert logits.stride(1) == 1
    count = logits.shape[0]
    losses, peaks, log_sums = torch.empty((3, count), device=logits.device).unbind()
    if count:
        by = losses if temperatures is None else temperatures.contiguous()
        made = (targets.contiguous(), losses, peaks, log_sums, by)
        form = _form(logits, cap, temperatures)
        losses_kernel[(count,)](logits, *made, logits.stride(0), cap, **form)
    return losses, peaks, log_sums


def launch_gradients(
    logits: Tensor,
    targets: Tensor,
    peaks: Tensor,
    log_sums: Tensor,
    grads: Tensor,
    cap: float,
    temperatures: Tensor | None,
) -> None:
    """See `label_operators.gradients_formula`."""
    assert logits.stride(1) == 1
    if not logits.shape[0]:
        return
    form = _form(logits, cap, temperatures)
    grid = (logits.shape[0], triton.cdiv(form["vocabulary"], form["columns"]))
    by = peaks if temperatures is None else temperatures.contiguous()
    given = (targets.contiguous(), peaks.contiguous(), log_sums.contiguous(), grads, by)
    gradients_kernel[grid](logits, *given, logits.stride(0), grads.stride(0), cap, **form)
