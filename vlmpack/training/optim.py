"""The learning rate, a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vlmpack.recipe.trainable import OptimSection


@dataclass(frozen=True, slots=True)
class Schedule:
    """Warm-up, then decay to a floor.

    Args:
        optim: peak, floor, length of the warm-up and shape of the decay.
        total_steps: optimizer steps of the run.
    """

    optim: OptimSection
    total_steps: int

    def __call__(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0."""
        optim, peak = self.optim, self.optim.lr
        if step < optim.warmup_steps:
            return peak * (step + 1) / optim.warmup_steps
        if optim.schedule == "constant":
            return peak
        floor = peak * optim.min_lr_ratio
        span = max(1, self.total_steps - optim.warmup_steps)
        progress = min(1.0, (step - optim.warmup_steps) / span)
        is_linear = optim.schedule == "linear"
        left = 1 - progress if is_linear else 0.5 * (1 + math.cos(math.pi * progress))
        return floor + (peak - floor) * left
