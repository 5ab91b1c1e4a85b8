"""Packages of kernels that are not installed: modules with their published signatures, whose
kernels refuse what the real ones refuse and compute on the fake GPU's numbers.

flash-attn 2.8, causal-conv1d 1.7, flash-linear-attention 0.6, mamba-ssm 2.3, and in liger.py
liger-kernel 0.8.5. `test_stand_ins.py` compares the signatures of all but the first with the
packages' own, where `make kernels` has installed them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from fake_cuda import liger
from fake_cuda.device import FakeCudaTensor
from torch import Tensor

from vlmpack.attention.flash_packages import flash_varlen
from vlmpack.backends import fused
from vlmpack.families.tower_attention import _best_attention
from vlmpack.recurrence import (
    RowSegments,
    StepSize,
    segment_convolution,
    segment_delta_rule,
    segment_scan,
)

aten = torch.ops.aten


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Any, options: Any) -> Tensor:
        out, lse, *_ = aten._flash_attention_forward(q, k, v, *bounds, 0.0, False, False, **options)
        ctx.save_for_backward(q, k, v, out, lse, *bounds[:2])
        ctx.longest, ctx.options = bounds[2:], options
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse, *cu = ctx.saved_tensors
        state = (torch.zeros(2, dtype=torch.uint64), torch.empty(0))
        found = aten._flash_attention_backward(
            grad, q, k, v, out, lse, *cu, *ctx.longest, 0.0, False, *state, **ctx.options
        )
        return *found, None, None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """flash-attn's, which fills channels up to a multiple of 8 itself."""
    assert dropout_p == softcap == 0 and alibi_slopes is block_table is None
    assert not return_attn_probs
    wide = -q.shape[-1] % 8
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    parts = (torch.nn.functional.pad(part, (0, wide)) for part in (q, k, v))
    left, right = window_size
    sides = {"window_size_left": left, "window_size_right": 0 if causal else right}
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out = _Flash.apply(*parts, bounds, {"scale": scale, **sides})
    return out[..., : q.shape[-1]]


class _Kernel(torch.autograd.Function):
    """A function of CPU tensors, called with those that the fake GPU's hold."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        if not all(isinstance(x, FakeCudaTensor) for x in tensors):
            raise RuntimeError("a kernel got a tensor of the CPU")
        ctx.leaves = [
            x.held.detach().requires_grad_(needs)
            for x, needs in zip(tensors, ctx.needs_input_grad[1:], strict=True)
        ]
        with torch.enable_grad():
            ctx.out = function(*ctx.leaves)
        return FakeCudaTensor(ctx.out.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        wanted = [leaf for leaf in ctx.leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(ctx.out, wanted, grad.held))
        return None, *(FakeCudaTensor(next(found)) if x.requires_grad else None for x in ctx.leaves)


def _row(cu_seqlens: Tensor) -> RowSegments:
    return RowSegments(tuple(cu_seqlens.diff().tolist()), cu_seqlens)


def _row_of(seq_idx: Tensor) -> RowSegments:
    """From (1, T) numbers of segments."""
    _, counts = seq_idx[0].unique_consecutive(return_counts=True)
    return _row(torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32))


def _require(rule: str, *, holds: bool) -> None:
    if not holds:
        raise RuntimeError(f"the kernel wants {rule}")


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """causal-conv1d's; with segments it wants channels as the fastest dimension."""
    assert seq_idx is not None and initial_states is final_states_out is None
    _require("channels that lie side by side, in strides of 8", holds=x.stride(1) == 1)
    _require("strides of 8", holds=x.stride(2) % 8 == 0 and x.stride(0) % 8 == 0)
    _require("2 to 4 taps", holds=2 <= weight.shape[1] <= 4)
    _require("int32 numbers of segments", holds=seq_idx.dtype is torch.int32)
    _require("(1, T) of them, contiguous", holds=seq_idx.shape == (x.shape[0], x.shape[2]))
    row = _row_of(seq_idx.held)
    tensors = [part for part in (x, weight, bias) if part is not None]

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return segment_convolution(x, weight, bias, row, activation=activation).to(x.dtype)

    return _Kernel.apply(convolve, *tensors)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """flash-linear-attention's rule."""
    assert not kwargs and scale is initial_state is cp_context is None and cu_seqlens is not None
    _require("one dtype, not float32", holds=q.dtype == k.dtype == v.dtype != torch.float32)
    _require("a row", holds=q.shape[0] == 1)
    row, dtype = _row(cu_seqlens.held), v.dtype

    def rule(*parts: Tensor) -> Tensor:
        return segment_delta_rule(*parts, row, normalize=use_qk_l2norm_in_kernel).to(dtype)

    return _Kernel.apply(rule, q, k, v, g, beta), None


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor:
    """mamba-ssm's scan."""
    assert z is initial_states is cu_seqlens is None and seq_idx is not None
    assert D is not None and dt_bias is not None
    _require("int32 numbers of segments", holds=seq_idx.dtype is torch.int32)
    row = _row_of(seq_idx.held)

    def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *more: Tensor) -> Tensor:
        step_size = StepSize(bias=more[1], softplus=dt_softplus, limits=dt_limit)
        return segment_scan(x, dt, a, b, c, row, skip=more[0], step_size=step_size).to(x.dtype)

    return _Kernel.apply(scan, x, dt, A, B, C, D, dt_bias)


MODULES: dict[str, dict[str, Any]] = {
    "flash_attn": {"flash_attn_varlen_func": flash_attn_varlen_func},
    "causal_conv1d": {"causal_conv1d_fn": causal_conv1d_fn},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
    "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": mamba_chunk_scan_combined},
    **liger.MODULES,
}
"""By module, what it has."""

VERSIONS = {"liger-kernel": liger.VERSION}
"""Of distributions that are asked for theirs."""


@contextmanager
def installed(names: Sequence[str]) -> Iterator[None]:
    """These modules can be imported."""
    made: dict[str, ModuleType] = {}
    for name in names:
        packages = name.split(".")
        for end in range(1, len(packages) + 1):
            path = ".".join(packages[:end])
            if path not in made:
                made[path] = ModuleType(path)
                made[path].__spec__ = ModuleSpec(path, None, is_package=True)
        made[name].__dict__.update(MODULES[name])
    stated = metadata.version

    def version(name: str) -> str:
        return VERSIONS.get(name) or stated(name)

    sys.modules.update(made)
    flash_varlen.cache_clear()
    _best_attention.cache_clear()  # of the tower, which asks once what is installed
    try:
        with patch.object(metadata, "version", version):
            yield
    finally:  # those alone: what was imported meanwhile stays
        for path in made:
            del sys.modules[path]
        flash_varlen.cache_clear()
        _best_attention.cache_clear()


@contextmanager
def liger_everywhere() -> Iterator[None]:
    """liger is installed, and kernels take any device; what Megatron compiles runs as it is
    written."""
    with (
        installed([*liger.MODULES]),
        patch.object(fused, "why_no_kernels", lambda _: None),
        torch.compiler.set_stance("force_eager"),
    ):
        yield
