"""Mamba-2's state space scan (SSD) inside the segments of a row.

    h[t] = exp(A dt[t]) h[t-1] + dt[t] B[t] x[t]^T,    h = 0 in front of each segment
    y[t] = h[t]^T C[t] + D x[t]

A row is computed in chunks. Inside a chunk, x is multiplied by a matrix of decayed C B^T. Between
chunks, states are handed on. Source: Dao and Gu 2024 (Transformers are SSMs, sections 6 and 7).
Heads and arguments are those of mamba-ssm's `mamba_chunk_scan_combined`, which transformers'
Mamba-2 layers call.

Shapes: T slots in M chunks of C. H heads of width P in G groups of H / G consecutive heads. The
state has width N.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import softplus

from vlmpack.recurrence.rows import (
    Chunks,
    RowSegments,
    chunk_size,
    decays,
    entry_decays,
    row_chunks,
    segment_chunks,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """How a layer's raw step becomes dt.

    Args:
        limits: what dt is clamped to, at last.
    """

    bias: Tensor | None = None
    softplus: bool = False
    limits: tuple[float, float] = (0.0, float("inf"))

    def of(self, dt: Tensor) -> Tensor:
        """Steps (..., H) from raw ones, in their dtype."""
        if self.bias is not None:
            dt = dt + self.bias.to(dt.dtype)
        if self.softplus:
            dt = softplus(dt)
        return dt.clamp(*self.limits)


PLAIN = StepSize()
"""A step that is dt as it stands."""


def _ssd_scan(
    cut: Callable[[RowSegments, int], Chunks],
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    row: RowSegments,
    *,
    skip: Tensor | None = None,
    step_size: StepSize = PLAIN,
) -> Tensor:
    """The scan over each segment of a row alone, in float32 or better whatever autocast says.

    Args:
        x: (1, T, H, P).
        dt: (1, T, H), raw.
        a: (H,), below 0.
        b: (1, T, G, N), what is written.
        c: (1, T, G, N), what is read.
        skip: D, (H,); None for none.

    Returns:
        (1, T, H, P) in the dtype of `x`.

    Raises:
        ValueError: tensors that are not this row.
    """
    row.check(x.shape[1])
    chunks = cut(row, chunk_size(x.device))
    with torch.autocast(x.device.type, enabled=False):
        dtype = torch.promote_types(x.dtype, torch.float32)
        whole, write, read, raw = (part.squeeze(0).to(dtype) for part in (x, b, c, dt))
        step = step_size.of(raw)
        out = _over_chunks(
            chunks.split(whole * step[..., None]),
            chunks.split(step * a.to(dtype)),
            chunks.split(write),
            chunks.split(read),
            chunks,
        )
        joined = chunks.join(out, row.width)
        if skip is not None:
            joined = joined + whole * skip.to(dtype)[:, None]
        return joined[None].to(x.dtype)


def _over_chunks(x: Tensor, g: Tensor, b: Tensor, c: Tensor, chunks: Chunks) -> Tensor:
    """Outputs (M, H, C, P) of x (M, H, C, P) times dt, g (M, H, C), b and c (M, G, C, N)."""
    groups = x.shape[1] // b.shape[1]
    within = decays(g, chunks.visible)
    entry = entry_decays(g, chunks.reads)
    scores = (c @ b.transpose(-1, -2)).repeat_interleave(groups, dim=1) * within
    b, c = (part.repeat_interleave(groups, dim=1) for part in (b, c))
    written = (b * within[..., -1, :, None]).transpose(-1, -2) @ x
    states = _states(written, entry[..., -1], chunks.steps)
    return scores @ x + (c * entry[..., None]) @ states


def _states(written: Tensor, left: Tensor, steps: tuple[int, ...]) -> Tensor:
    """The states that enter the chunks.

    Args:
        written: (M, H, N, P), what each chunk adds.
        left: (M, H), what is left of the state that enters it.
        steps: as `Chunks.steps`.

    Returns:
        (M, H, N, P).
    """
    state = written.new_zeros(steps[0] if steps else 0, *written.shape[1:])
    states: list[Tensor] = []
    parts = (x.split(steps) for x in (written, left[..., None, None]))
    for count, written_s, left_s in zip(steps, *parts, strict=True):
        state = state if count == state.shape[0] else state[:count]
        states.append(state)
        state = torch.addcmul(written_s, state, left_s)
    return torch.cat(states)


segment_scan = partial(_ssd_scan, segment_chunks)
"""The scan with every segment in chunks of its own: the fastest where shapes may follow the row."""

fixed_scan = partial(_ssd_scan, row_chunks)
"""The scan over the row's own chunks, whose shapes are those of every row of this width."""
