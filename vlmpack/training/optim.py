"""The learning rate, a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Warm-up, then decay to a floor.

    Args:
        peak: learning rate after the warm-up.
        floor: learning rate at the end.
        warmup_steps: optimizer steps of linear warm-up.
        total_steps: optimizer steps of the run.
        kind: shape of the decay.
    """

    peak: float
    floor: float
    warmup_steps: int
    total_steps: int
    kind: Literal["cosine", "linear", "constant"]

    def __call__(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        left = 1 - progress if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.floor + (self.peak - self.floor) * left
