"""RMSNorm for Megatron's local layer spec, with the flag that sequence parallelism needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.fused import FusedOps, NormForm

_FORM = NormForm(offset=0.0, rounds_first=True)


class RMSNorm(nn.Module):
    """y = weight * (x / rms(x)), the mean of squares in float32 or wider (1910.07467).

    Megatron's own wrapper of torch's norm refuses sequence parallelism. The weight carries the flag
    `sequence_parallel`, by which Megatron sums its gradient over the TP ranks, each of which sees
    only its share of the tokens.

    Args:
        config: TransformerConfig; `sequence_parallel` is read.
        hidden_size: width of the last dimension.
        eps: added to the mean of squares.
        ops: what runs it as one kernel; None for torch's operators one by one.
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-6,
        ops: FusedOps | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) -> the same shape and dtype."""
        if self.ops is not None:
            return self.ops.norm(x, self.weight, self.eps, _FORM)
        scaled = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)
