"""Kernels for CUDA, behind the signatures of the torch forms: causal-conv1d, flash-linear-attention
and mamba-ssm.

Each is imported when it is called, after `choose` has imported it once. Triton kernels are tested
by its interpreter on a CPU. None has been run on a GPU by this version's tests unless docs/gpu.md
says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmpack.recurrence.convolution import segment_convolution
from vlmpack.recurrence.rows import RowSegments
from vlmpack.recurrence.scan import PLAIN, StepSize

RULE_CHUNK = 64
"""Slots of a chunk of flash-linear-attention's rule, where nothing else is asked."""

SCAN_CHUNK = 256
"""Slots of a chunk of mamba-ssm's scan: what its own layers take."""


def conv1d_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row: RowSegments,
    *,
    activation: str | None = None,
) -> Tensor:
    """causal-conv1d's kernel; arguments and result as `segment_convolution`.

    The kernel knows boundaries only where channels are the fastest dimension, in strides of 8. A
    row of another layout is copied once. It refuses channels that 8 does not divide, and filters of
    fewer than 2 or more than 4 taps. These take the torch form.
    """
    from causal_conv1d import causal_conv1d_fn

    row.check(x.shape[2])
    if x.shape[1] % 8 or not 2 <= weight.shape[1] <= 4:
        return segment_convolution(x, weight, bias, row, activation=activation)
    if x.stride(1) != 1 or x.stride(2) % 8 or x.stride(0) % 8:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    out: Tensor = causal_conv1d_fn(x, weight, bias, seq_idx=row.seq_idx, activation=activation)
    return out


def fla_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row: RowSegments,
    *,
    activation: str | None = None,
) -> Tensor:
    """flash-linear-attention's Triton kernel; arguments and result as `segment_convolution`.

    It counts its chunks on the host, of a size that it chooses, so no graph can record it.
    """
    from fla.modules.convolution import causal_conv1d

    row.check(x.shape[2])
    out, _ = causal_conv1d(
        x.transpose(1, 2),
        weight,
        bias,
        activation=activation,
        cu_seqlens=_own(row),
        cu_seqlens_cpu=row.cu_seqlens_host,  # else it reads them back from the device
    )
    found: Tensor = out.transpose(1, 2)
    return found


def fla_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    row: RowSegments,
    *,
    normalize: bool = False,
) -> Tensor:
    """flash-linear-attention's chunked rule; arguments and result as `segment_delta_rule`.

    Chunk indices have one shape for all rows of a width and are made on the device. So no layer
    reads the host, and a captured graph is valid for other segments.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    row.check(query.shape[1])
    out, _ = chunk_gated_delta_rule(
        query.to(value.dtype),  # under autocast the three may differ
        key.to(value.dtype),
        value,
        g=g,
        beta=beta,
        cu_seqlens=_own(row),
        chunk_indices=row.chunk_indices(RULE_CHUNK),
        use_qk_l2norm_in_kernel=normalize,
    )
    found: Tensor = out.to(query.dtype)
    return found


def mamba_scan(
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
    """mamba-ssm's Triton scan; arguments and result as `segment_scan`."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    row.check(x.shape[1])
    out: Tensor = mamba_chunk_scan_combined(
        x,
        dt,
        a,
        b,
        c,
        chunk_size=SCAN_CHUNK,
        D=skip,
        seq_idx=row.seq_idx,
        dt_bias=step_size.bias,
        dt_softplus=step_size.softplus,
        dt_limit=step_size.limits,
    )
    return out


def _own(row: RowSegments) -> Tensor:
    """(N + 1,) int64: boundaries in a new tensor of this row.

    flash-linear-attention caches what it derives from a tensor by object identity. Boundaries
    written again and again into one buffer would be taken for the first row's.
    """
    return row.once("fla", lambda: row.cu_seqlens.to(torch.int64))
