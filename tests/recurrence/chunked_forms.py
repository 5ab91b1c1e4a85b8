"""The chunked forms of each recurrence beside the recurrence itself, called alike.

A form is told the segments of a row; the recurrence (`support.recurrences`) sees each alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support.recurrences import by_segment, delta_rule, segments, ssd, with_gradients
from torch import Tensor

from vlmpack.recurrence import (
    StepSize,
    fixed_delta_rule,
    fixed_scan,
    segment_delta_rule,
    segment_scan,
)

NO_LIMITS = (0.0, float("inf"))


@dataclass(frozen=True)
class Chunked:
    """A recurrence.

    Args:
        module: of vlmpack.recurrence.
        forms: name -> form.
        inputs: (total slots, dtype, seed=, decay=) -> leaves.
        packed: (form, leaves, lengths) -> (T, H, V) over a row of such segments.
        literal: (leaves, lengths) -> the same by the recurrence.
    """

    module: str
    forms: Mapping[str, Callable[..., Tensor]]
    inputs: Callable[..., list[Tensor]]
    packed: Callable[..., Tensor]
    literal: Callable[..., Tensor]

    def compared(
        self,
        form: Callable[..., Tensor],
        lengths: Sequence[int],
        leaves: Sequence[Tensor],
        told: Sequence[int] | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Values and gradients of a form that was told of segments, and of the recurrence."""
        exact = [x.detach().double().requires_grad_() for x in leaves]
        got = with_gradients(self.packed(form, leaves, told or lengths), leaves)
        return got, with_gradients(self.literal(exact, lengths), exact)


def delta_inputs(
    total: int, dtype: torch.dtype = torch.float64, seed: int = 0, decay: float = 1.0
) -> list[Tensor]:
    """Queries and keys of 2 heads of width 6 and values of 4 of width 5, g and beta."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(total, heads, width, generator=draw, dtype=torch.float64)
        for heads, width in ((2, 6), (2, 6), (4, 5))
    )
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    g = -decay * torch.rand(total, 4, generator=draw, dtype=torch.float64)
    beta = torch.rand(total, 4, generator=draw, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta)]


def delta_packed(
    form: Callable[..., Tensor], leaves: Sequence[Tensor], lengths: Sequence[int], **options: Any
) -> Tensor:
    """(T, H, V) over a row of such segments."""
    return form(*(x[None] for x in leaves), segments(lengths), **options)[0]


def scan_inputs(
    total: int, dtype: torch.dtype = torch.float64, seed: int = 0, decay: float = 1.0
) -> list[Tensor]:
    """x of 4 heads of width 5, raw steps, b and c of 2 groups of width 6; a, skip, dt's bias."""
    draw = torch.Generator().manual_seed(seed)
    shapes = ((total, 4, 5), (total, 4), (total, 2, 6), (total, 2, 6))
    tokens = [torch.randn(*s, generator=draw, dtype=torch.float64) for s in shapes]
    a = -decay * (0.1 + torch.rand(4, generator=draw, dtype=torch.float64))
    skip, bias = (torch.randn(4, generator=draw, dtype=torch.float64) for _ in range(2))
    return [x.to(dtype).requires_grad_() for x in (*tokens, a, skip, bias)]


def scan_packed(
    form: Callable[..., Tensor],
    leaves: Sequence[Tensor],
    lengths: Sequence[int],
    limits: tuple[float, float] = NO_LIMITS,
) -> Tensor:
    """(T, H, P) over a row of such segments."""
    x, dt, b, c = (part[None] for part in leaves[:4])
    a, skip, bias = leaves[4:]
    step_size = StepSize(bias=bias, softplus=True, limits=limits)
    return form(x, dt, a, b, c, segments(lengths), skip=skip, step_size=step_size)[0]


def scan_literal(
    leaves: Sequence[Tensor], lengths: Sequence[int], limits: tuple[float, float] = NO_LIMITS
) -> Tensor:
    """The same by the recurrence."""

    def alone(*part: Tensor) -> Tensor:
        return ssd(*part, *leaves[4:], limits)

    return by_segment(alone, lengths, leaves[:4])


DELTA_RULE = Chunked(
    module="delta_rule",
    forms={"segments": segment_delta_rule, "fixed": fixed_delta_rule},
    inputs=delta_inputs,
    packed=delta_packed,
    literal=lambda leaves, lengths: by_segment(delta_rule, lengths, leaves),
)
SCAN = Chunked(
    module="scan",
    forms={"segments": segment_scan, "fixed": fixed_scan},
    inputs=scan_inputs,
    packed=scan_packed,
    literal=scan_literal,
)
