"""Recurrences written as their definitions say, one token after the other, in float64.

Nothing of the package is used here: these are what its chunked forms are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlmpack.forecast.parameters import RecurrentSizes
from vlmpack.recurrence import RowSegments

LAYOUTS = {
    "one": (7,),
    "equal": (16,) * 6,
    "unequal": (3, 70, 1, 64, 129, 2),
    "whole chunks": (64, 128, 64),
    "ones": (1,) * 9,
    "empty segments": (0, 5, 0, 0, 66, 6, 0),
}
"""Lengths of segments shorter than a chunk (64), as long, and longer."""


def segments(lengths: Sequence[int]) -> RowSegments:
    """The segments of a row on CPU."""
    return RowSegments(tuple(lengths), torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *, activate: bool) -> Tensor:
    """(T, D) of one sequence: each tap added where there is a token to read."""
    taps = weight.shape[1]
    rows = []
    for t in range(x.shape[0]):
        row = torch.zeros_like(x[0]) if bias is None else bias
        for back in range(taps):
            if back <= t:
                row = row + weight[:, taps - 1 - back] * x[t - back]
        rows.append(silu(row) if activate else row)
    return torch.stack(rows)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, normalize: bool = False
) -> Tensor:
    """(T, H, V) of one sequence: q and k are (T, Hk, K), v is (T, H, V), g and beta are (T, H)."""
    groups = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(groups, dim=1) for x in (q, k))
    if normalize:
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=v.dtype)
    rows = []
    for t in range(q.shape[0]):
        state = state * g[t].exp()[:, None, None]
        found = (state * k[t][..., None]).sum(1)
        state = state + k[t][..., None] * (beta[t][:, None] * (v[t] - found))[:, None]
        rows.append((state * q[t][..., None]).sum(1) / q.shape[2] ** 0.5)
    return torch.stack(rows)


def ssd(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    skip: Tensor | None,
    dt_bias: Tensor | None,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """(T, H, P) of one sequence: x is (T, H, P), dt is (T, H), b and c are (T, G, N)."""
    groups = x.shape[1] // b.shape[1]
    b, c = (part.repeat_interleave(groups, dim=1) for part in (b, c))
    step = softplus(dt if dt_bias is None else dt + dt_bias).clamp(*limits)
    state = torch.zeros(x.shape[1], b.shape[2], x.shape[2], dtype=x.dtype)
    rows = []
    for t in range(x.shape[0]):
        written = b[t][..., None] * (step[t][:, None] * x[t])[:, None]
        state = state * (a * step[t]).exp()[:, None, None] + written
        row = (state * c[t][..., None]).sum(1)
        rows.append(row if skip is None else row + skip[:, None] * x[t])
    return torch.stack(rows)


def by_segment(
    literal: Callable[..., Tensor], lengths: Sequence[int], tensors: Sequence[Tensor]
) -> Tensor:
    """A recurrence over each segment of (T, ...) tensors alone, end to end."""
    parts = zip(*(x.split(list(lengths)) for x in tensors), strict=True)
    return torch.cat([literal(*part) for part in parts if part[0].shape[0]])


def with_gradients(output: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The output in float64, and the gradients of a sum that weighs each entry otherwise."""
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view(output.shape)
    grads = torch.autograd.grad((output * weights).sum(), leaves)
    return [x.detach().double() for x in (output, *grads)]


def worst(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest entry of its reference (at least 1)."""
    return max(
        float((g - w).abs().max() / w.abs().max().clamp(min=1))
        for g, w in zip(got, want, strict=True)
    )


def recurrent_sizes(kind: str, keys: int, heads: int, key: int, value: int) -> RecurrentSizes:
    """As a forecast has them: heads of keys and of values, and their widths."""
    return RecurrentSizes(
        kind="scan" if kind == "scan" else "delta_rule",
        channels=2 * keys * key + heads * value,
        heads=heads,
        keys=keys * key,
        key_width=key,
        inner=heads * value,
    )


class Operators(TorchDispatchMode):
    """Every operator that ran: its name and the shapes and dtypes of what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.stream: list[tuple[object, ...]] = []
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        scalars = tuple(x for x in tree_leaves((args, kwargs)) if isinstance(x, int | float))
        self.stream.append((str(func), scalars, *((tuple(x.shape), x.dtype) for x in made)))
        self.bytes += sum(x.numel() * x.element_size() for x in made)
        return out
