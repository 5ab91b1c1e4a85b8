"""Causal attention inside the segments of a packed row, for heads wider than other kernels take.

    vlmpack::wide_attention            queries, keys, values, boundaries -> outputs, lse
    vlmpack::wide_attention_backward   gradients of queries, keys and values, from outputs and lse

flash-attn and torch's varlen kernel take heads of at most 256 channels. On CUDA these operators are
Triton kernels (`wide_kernels.py`). Elsewhere they are the formula, which computes T x T scores for
tests. Triton compiles the kernels for bfloat16 and float16. Float32 runs in its interpreter alone,
since products of whole float32 heads would spill. No GPU has run them yet.

Whatever looks at operators (torch.compile, recomputation, a recorder) sees one of each.

    lse = log(sum over seen keys of exp(scale * q k));   out = sum of exp(scale * q k - lse) * v
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vlmpack.kernel_operators import OPERATORS, define

WIDEST = 512
"""Channels of a head that the kernels take: tiles of more would not fit shared memory."""
SHARED = 128 << 10
"""Bytes of shared memory that a program of the backward pass needs."""


def why_no_wide_heads(largest_head: int, device: torch.device) -> str | None:
    """Why the kernels cannot run heads of so many channels here; None where they can."""
    if largest_head > WIDEST:
        return f"vlmpack's kernel of at most {WIDEST}, the model has {largest_head}"
    ours = f"vlmpack's kernel for the model's {largest_head} needs"
    if device.type != "cuda":
        return f"{ours} a CUDA device, this one is {device.type}"
    if find_spec("triton") is None:
        return f"{ours} Triton, which torch's builds for CUDA bring"
    room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return (
        None if room >= SHARED else f"{ours} {SHARED} bytes of shared memory, this GPU has {room}"
    )


def _scores(q: Tensor, k: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """(Hq, T, T), -inf where a query (row) sees no key."""
    slots = torch.arange(len(q), dtype=cu_seqlens.dtype, device=q.device)
    segment = torch.searchsorted(cu_seqlens[1:], slots, right=True)
    seen = (segment[:, None] == segment) & (slots[:, None] >= slots)
    return (scale * torch.einsum("qhd,khd->hqk", q, k)).masked_fill(~seen, -torch.inf)


def _wide(x: Tensor, groups: int = 1) -> Tensor:
    """In float32 or wider, each head so many times."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).repeat_interleave(groups, dim=1)


def attention_formula(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of each slot over itself and what comes before it in its segment.

    Args:
        q: (T, Hq, D).
        k: (T, Hkv, D); Hq is a multiple of Hkv (grouped-query attention).
        v: (T, Hkv, D).
        cu_seqlens: (N + 1,) int32, from 0 to T. One that repeats ends an empty segment.
        scale: factor on the scores.

    Returns:
        (T, Hq, D), and (Hq, T) log-sum-exp of the scores in float32 or wider.
    """
    groups = q.shape[1] // k.shape[1]
    scores = _scores(_wide(q), _wide(k, groups), cu_seqlens, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    out = torch.einsum("hqk,khd->qhd", weights, _wide(v, groups))
    return out.to(q.dtype).contiguous(), lse


def attention_backward_formula(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, in their dtypes."""
    groups = q.shape[1] // k.shape[1]
    wide_q, wide_k, wide_v, given = _wide(q), _wide(k, groups), _wide(v, groups), _wide(grad)
    weights = (_scores(wide_q, wide_k, cu_seqlens, scale) - lse[..., None]).exp()
    along = (given * _wide(out)).sum(-1).T[..., None]
    slope = scale * weights * (torch.einsum("qhd,khd->hqk", given, wide_v) - along)
    q_grad = torch.einsum("hqk,khd->qhd", slope, wide_k)
    k_grad, v_grad = (
        torch.einsum("hqk,qhd->khd", *pair).unflatten(1, (-1, groups)).sum(2)
        for pair in ((slope, wide_q), (weights, given))
    )
    made = [x.to(q.dtype).contiguous() for x in (q_grad, k_grad, v_grad)]
    return made[0], made[1], made[2]


_QKV = "Tensor q, Tensor k, Tensor v"
define(
    f"wide_attention({_QKV}, Tensor cu_seqlens, float scale) -> (Tensor, Tensor)",
    attention_formula,
    "vlmpack.attention.wide_kernels",
    "launch_attention",
)
define(
    f"wide_attention_backward(Tensor grad, {_QKV}, Tensor out, Tensor lse, Tensor cu_seqlens, "
    "float scale) -> (Tensor, Tensor, Tensor)",
    attention_backward_formula,
    "vlmpack.attention.wide_kernels",
    "launch_attention_backward",
)


class _WideAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float
    ) -> Tensor:
        out: Tensor
        out, lse = OPERATORS.wide_attention(q, k, v, cu_seqlens, scale)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        found = OPERATORS.wide_attention_backward(grads[0], *ctx.saved_tensors, ctx.scale)
        return *found, None, None


def wide_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *, scale: float | None = None
) -> Tensor:
    """(T, Hq, D) outputs; arguments as those of `attention_formula`. `scale` is 1 / sqrt(D) if
    None."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    made: Tensor = _WideAttention.apply(query, key, value, cu_seqlens, scale)  # type: ignore[no-untyped-call]
    return made
