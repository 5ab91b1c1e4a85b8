"""Named parameters as the groups of an AdamW (1711.05101), and clipping of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.policy import ParameterPolicy
from vlmpack.recipe.trainable import OptimSection


def adamw_groups(
    parameters: Sequence[tuple[str, nn.Parameter]],
    optim: OptimSection,
    *,
    policy_of: Callable[[str, int], ParameterPolicy],
) -> list[dict[str, Any]]:
    """Two parameter groups for each component. Weights decay, biases and norms do not
    (`vlmpack.backends.policy` says why LoRA matrices do). Besides torch's own keys a group has
    `lr_scale`, which `set_learning_rate` reads.

    Args:
        optim: the learning rate in it is not used; the schedule sets it every step.
    """
    members: dict[ParameterPolicy, list[nn.Parameter]] = {}
    for name, parameter in parameters:
        members.setdefault(policy_of(name, parameter.ndim), []).append(parameter)
    return [
        {
            "params": members[said],
            "weight_decay": optim.weight_decay if said.decays else 0.0,
            "lr_scale": said.lr_scale,
            "component": said.component,
        }
        for said in sorted(members, key=lambda said: (said.component, not said.decays))
    ]


def set_learning_rate(groups: Iterable[dict[str, Any]], lr: float) -> None:
    """That of the schedule, times each group's own factor."""
    for group in groups:
        group["lr"] = lr * group["lr_scale"]


def multiply_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by one number that stays on its device."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for dtype, members in by_dtype.items():
        torch._foreach_mul_(members, factor.to(dtype))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of a global norm are multiplied with, as torch's `clip_grad_norm_` has it."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
