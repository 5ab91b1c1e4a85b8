"""AdamW and its learning-rate schedule, a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    """AdamW (1711.05101).

    Args:
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled decay of weights with two or more dimensions; biases and norms have
            none.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float


def build_adamw(
    parameters: Sequence[tuple[str, nn.Parameter]], config: AdamWConfig, *, fused: bool
) -> torch.optim.AdamW:
    """AdamW with two groups: weights that decay, and biases and norms that do not.

    Args:
        parameters: names and parameters.
        config: hyper-parameters; the learning rate is set every step by the schedule.
        fused: one kernel for all tensors; not for sharded parameters.
    """
    decayed = [p for _, p in parameters if p.ndim >= 2]
    plain = [p for _, p in parameters if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=0.0, betas=config.betas, eps=config.eps, fused=fused or None
    )
