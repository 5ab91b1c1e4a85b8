"""AdamW's hyper-parameters, and torch's AdamW over named parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


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
