"""RMSNorm for Megatron's local layer spec, with the flag that sequence parallelism needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.fused import FusedOps, NormForm

PLAIN = NormForm(offset=0.0, rounds_first=True)
"""As Llama and Qwen have it up to Qwen3."""


class RMSNorm(nn.Module):
    """y = (offset + weight) * (x / rms(x)), the mean of squares in float32 or wider (1910.07467).

    Megatron's own wrapper of torch's norm refuses sequence parallelism. The weight carries the flag
    `sequence_parallel`, by which Megatron sums its gradient over the TP ranks, each of which sees
    only its share of the tokens.

    Args:
        config: TransformerConfig; `sequence_parallel` is read.
        hidden_size: width of the last dimension.
        eps: added to the mean of squares.
        ops: what runs it as one kernel; None for torch's operators one by one.
        form: the offset, and where it rounds.
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-6,
        ops: FusedOps | None = None,
        form: NormForm = PLAIN,
        **_: Any,
    ) -> None:
        super().__init__()
        self.ops, self.form = ops, form
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) -> the same shape and dtype."""
        if self.ops is not None:
            return self.ops.norm(x, self.weight, self.eps, self.form)
        scaled = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + self.eps)
        if self.form.rounds_first:
            return self.weight * scaled.to(x.dtype)
        return ((self.form.offset + self.weight.to(scaled.dtype)) * scaled).to(x.dtype)
