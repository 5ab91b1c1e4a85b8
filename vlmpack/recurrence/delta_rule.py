"""The gated delta rule inside the segments of a row.

    S[t] = exp(g[t]) S[t-1] + k[t] (beta[t] (v[t] - exp(g[t]) S[t-1]^T k[t]))^T
    o[t] = S[t]^T q[t] / sqrt(K),    S = 0 in front of each segment

The updates of a chunk depend on one another through a unit lower triangular system. It is solved at
once for the updates without the state that enters the chunk (u), and for their response to it (w).
Sources: Yang, Kautz and Hatamizadeh 2024 (Gated Delta Networks) for the rule and its decays, Yang
et al. 2024 (Parallelizing Linear Transformers with the Delta Rule over Sequence Length) for the
system. Heads and arguments are those of Qwen3-Next and Qwen3.5.

Shapes: T slots in M chunks of C. H heads of values and Hk heads of queries and keys, each of which
serves H / Hk consecutive heads of values. A key has width K, a value width V.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from vlmpack.recurrence.rows import (
    Chunks,
    RowSegments,
    chunk_size,
    decays,
    entry_decays,
    row_chunks,
    segment_chunks,
)

L2_EPSILON = 1e-6
"""Added to the squared norm of queries and keys, as flash-linear-attention does."""


def _delta_rule(
    cut: Callable[[RowSegments, int], Chunks],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    row: RowSegments,
    *,
    normalize: bool = False,
) -> Tensor:
    """The rule over each segment of a row alone, in float32 or better whatever autocast says.

    Args:
        query: (1, T, Hk, K).
        key: (1, T, Hk, K).
        value: (1, T, H, V).
        g: (1, T, H), the log of what is left of the state, at most 0.
        beta: (1, T, H), how much of a key's old value is replaced.
        normalize: whether queries and keys are brought to length 1 first.

    Returns:
        (1, T, H, V) in the dtype of `query`.

    Raises:
        ValueError: tensors that are not this row.
    """
    row.check(query.shape[1])
    chunks = cut(row, chunk_size(query.device))
    with torch.autocast(query.device.type, enabled=False):
        dtype = torch.promote_types(query.dtype, torch.float32)
        q, k, v, decay, rate = (x.squeeze(0).to(dtype) for x in (query, key, value, g, beta))
        if normalize:
            q, k = (_unit(x) for x in (q, k))
        groups = v.shape[1] // k.shape[1]
        q, k = (chunks.split(x).repeat_interleave(groups, dim=1) for x in (q, k))
        out = _over_chunks(
            q * q.shape[-1] ** -0.5,
            k,
            chunks.split(v),
            chunks.split(decay),
            chunks.split(rate),
            chunks,
        )
        return chunks.join(out, row.width)[None].to(query.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + L2_EPSILON)


def _over_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks
) -> Tensor:
    """Outputs (M, H, C, V) of q and k (M, H, C, K), v (M, H, C, V), g and beta (M, H, C)."""
    within = decays(g, chunks.visible)
    entry = entry_decays(g, chunks.reads)
    rate = beta[..., None]
    # Only what lies below the diagonal is read of it.
    system = (k @ k.transpose(-1, -2)) * within * rate
    sides = torch.cat((v * rate, k * (rate * entry[..., None])), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    leaving = (k * within[..., -1, :, None]).transpose(-1, -2)
    updates, states = _states(u, w, leaving, entry[..., -1], chunks.steps)
    scores = (q @ k.transpose(-1, -2)) * within
    return (q * entry[..., None]) @ states + scores @ updates


def _states(
    u: Tensor, w: Tensor, leaving: Tensor, left: Tensor, steps: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The scan over chunks.

    Args:
        u: (M, H, C, V), the updates without a state.
        w: (M, H, C, K), what a state takes from them.
        leaving: (M, H, K, C), keys as they are written into the state that leaves.
        left: (M, H), what is left of the state that enters.
        steps: as `Chunks.steps`.

    Returns:
        The updates (M, H, C, V), and the states that enter the chunks (M, H, K, V).
    """
    state = u.new_zeros(steps[0] if steps else 0, u.shape[1], w.shape[-1], u.shape[-1])
    updates: list[Tensor] = []
    states: list[Tensor] = []
    parts = (x.split(steps) for x in (u, w, leaving, left[..., None, None]))
    for count, u_s, w_s, leaving_s, left_s in zip(steps, *parts, strict=True):
        state = state if count == state.shape[0] else state[:count]
        update = u_s - w_s @ state
        states.append(state)
        updates.append(update)
        state = state * left_s + leaving_s @ update
    return torch.cat(updates), torch.cat(states)


segment_delta_rule = partial(_delta_rule, segment_chunks)
"""The rule with every segment in chunks of its own: the fastest where shapes may follow the row."""

fixed_delta_rule = partial(_delta_rule, row_chunks)
"""The rule over the row's own chunks, whose shapes are those of every row of this width."""
