"""Operators that only CUDA has, computed on a CPU as their documentation says.

Each refuses what its CUDA kernel refuses. Sources: torch 2.13's `mha_varlen_fwd` and `_bwd`
(aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp) and flash-attention 2's README.

Shapes: T queries, S keys, Hq and Hkv heads, D channels, N segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Varlen:
    """Segments of queries and keys, and which key a query sees: not beyond `left` in front of it
    nor `right` behind it (-1: all), where the last query stands at the last key."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    left: int
    right: int

    def segments(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Slots of the queries, of the keys, and (queries, keys) bool."""
        bounds = zip(self.cu_q.tolist(), self.cu_k.tolist(), strict=True)
        for (q0, k0), (q1, k1) in pairwise(bounds):
            if q1 - q0 > self.max_q or k1 - k0 > self.max_k:
                raise RuntimeError(
                    f"a segment of {q1 - q0} queries and {k1 - k0} keys; the kernel was told of at "
                    f"most {self.max_q} and {self.max_k} and would compute no more"
                )
            row = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
            column = torch.arange(k1 - k0)[None]
            seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
            if self.left >= 0:
                seen &= column >= row - self.left
            if self.right >= 0:
                seen &= column <= row + self.right
            yield slice(q0, q1), slice(k0, k1), seen


def _call(
    query: Tensor, key: Tensor, value: Tensor, bounds: tuple[Any, ...], causal: bool, sides: Any
) -> _Varlen:
    """The call, where the kernel takes it.

    Raises:
        RuntimeError: it does not.
    """
    parts = (query, key, value)
    cu_q, cu_k, max_q, max_k = bounds
    wrong = {
        "bfloat16 or float16": any(x.dtype not in (torch.bfloat16, torch.float16) for x in parts),
        "one dtype": len({x.dtype for x in parts}) > 1,
        "three dimensions": any(x.ndim != 3 for x in parts),
        "int32 boundaries": {cu_q.dtype, cu_k.dtype} != {torch.int32},
        "contiguous boundaries": not (cu_q.is_contiguous() and cu_k.is_contiguous()),
        "one number of channels, which 8 divides, at most 256": len({x.shape[-1] for x in parts})
        > 1
        or query.shape[-1] % 8 > 0
        or query.shape[-1] > 256,
        "contiguous channels": any(x.stride(-1) != 1 for x in parts),
        "whole groups of heads": query.shape[1] % key.shape[1] > 0,
    }
    broken = [rule for rule, is_broken in wrong.items() if is_broken]
    if broken:
        shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in parts)
        raise RuntimeError(f"the varlen kernel wants {'; '.join(broken)}; it got {shapes}")
    left, right = ((-1 if side is None else side) for side in sides)
    return _Varlen(cu_q, cu_k, max_q, max_k, left, 0 if causal else right)


def _scores(query: Tensor, key: Tensor, scale: float, seen: Tensor) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return scores.masked_fill(~seen, -torch.inf)


def _wide(tensor: Tensor, groups: int = 1) -> Tensor:
    return tensor.float().repeat_interleave(groups, dim=1)


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    """(T, Hq, D) outputs, (Hq, T) float32 lse, and what dropout would need."""
    assert dropout == 0.0 and not debug and not any(x is not None for x in others.values())
    sides = (window_size_left, window_size_right)
    call = _call(query, key, value, (cu_q, cu_k, max_q, max_k), causal, sides)
    scale, groups = scale or query.shape[-1] ** -0.5, query.shape[1] // key.shape[1]
    out, lse = torch.zeros_like(query), query.new_zeros(query.shape[1::-1], dtype=torch.float32)
    for at, to, seen in call.segments():
        scores = _scores(_wide(query[at]), _wide(key[to], groups), scale, seen)
        lse[:, at] = scores.logsumexp(-1)
        weights = (scores - lse[:, at, None]).exp()
        out[at] = torch.einsum("hqk,khd->qhd", weights, _wide(value[to], groups)).to(out.dtype)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def flash_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from outputs and lse that may be those of more keys."""
    sides = (window_size_left, window_size_right)
    call = _call(query, key, value, (cu_q, cu_k, max_q, max_k), causal, sides)
    scale, groups = scale or query.shape[-1] ** -0.5, query.shape[1] // key.shape[1]
    found = tuple(torch.zeros_like(x) for x in (query, key, value))
    for at, to, seen in call.segments():
        q, k, v = _wide(query[at]), _wide(key[to], groups), _wide(value[to], groups)
        weights = (_scores(q, k, scale, seen) - lse[:, at, None]).exp()
        of_out = _wide(grad[at])
        of_weights = torch.einsum("qhd,khd->hqk", of_out, v)
        told = (of_out * _wide(out[at])).sum(-1).T[..., None]
        of_scores = weights * (of_weights - told) * scale
        found[0][at] = torch.einsum("hqk,khd->qhd", of_scores, k).to(query.dtype)
        of_keys = torch.einsum("hqk,qhd->khd", of_scores, q)
        of_values = torch.einsum("hqk,qhd->khd", weights, of_out)
        for whole, part in zip(found[1:], (of_keys, of_values), strict=True):
            whole[to] = part.unflatten(1, (-1, groups)).sum(2).to(whole.dtype)
    return found


def _rows(*tensors: Tensor) -> list[Tensor]:
    """(B, H, S, D) -> (B * S, H, D)."""
    return [x.transpose(1, 2).flatten(0, 1) for x in tensors]


def _ends(rows: int, length: int) -> Tensor:
    """Boundaries of rows of one length."""
    return torch.arange(0, rows * length + 1, length, dtype=torch.int32)


def sdpa_flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`_scaled_dot_product_flash_attention`, whose last query is causal at the last key: (B, Hq, S,
    D) outputs, (B, Hq, S) float32 lse, and what dropout and boundaries would need."""
    rows, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    bounds = (_ends(rows, queries), _ends(rows, keys), queries, keys)
    flat = _rows(query, key, value)
    out, lse, *rest = flash_attention_forward(*flat, *bounds, dropout, causal, debug, scale=scale)
    out = out.unflatten(0, (rows, queries)).transpose(1, 2)
    lse = lse.unflatten(1, (rows, queries)).transpose(0, 1).contiguous()
    return out, lse, torch.empty(0), torch.empty(0), queries, keys, *rest


def sdpa_flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    *state: Tensor,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value."""
    rows = query.shape[0]
    bounds = (_ends(rows, max_q), _ends(rows, max_k), max_q, max_k)
    q, k, v, made, of_out = _rows(query, key, value, out, grad)
    told = lse.transpose(0, 1).flatten(1)
    found = flash_attention_backward(
        of_out, q, k, v, made, told, *bounds, dropout, causal, *state, scale=scale
    )
    return tuple(x.unflatten(0, (rows, -1)).transpose(1, 2) for x in found)


def wide_mm(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    """A product in float32 of two matrices in bfloat16, as CUDA alone has it."""
    assert left.dtype is right.dtype is torch.bfloat16 and out_dtype is torch.float32
    return left.float() @ right.float()


def wide_addmm(added: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The same, added to a matrix in float32."""
    assert added.dtype is out_dtype
    return added + wide_mm(left, right, out_dtype)


def histc(values: Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> Tensor:
    """CUDA's counts integers, too."""
    return torch.histc(values.float(), bins, min, max).to(values.dtype)


KERNELS: dict[Any, Callable[..., Any]] = {
    aten._flash_attention_forward.default: flash_attention_forward,
    aten._flash_attention_backward.default: flash_attention_backward,
    aten._scaled_dot_product_flash_attention.default: sdpa_flash_forward,
    aten._scaled_dot_product_flash_attention_backward.default: sdpa_flash_backward,
    aten.histc.default: histc,
    aten.mm.dtype: wide_mm,
    aten.addmm.dtype: wide_addmm,
}
"""By operator."""
