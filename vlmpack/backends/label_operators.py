"""The losses of rows of logits and their gradients, each as one operator of torch.

    vlmpack::label_losses      logits, targets -> the losses, and what the gradients need
    vlmpack::label_gradients   the gradients, written over the logits

On CUDA an operator is a Triton kernel (`label_kernels.py`), which reads each logit once, in the
dtype of the product that made it. Elsewhere it is the formula, with z for the logits and t for the
target:

    loss      log(sum(exp(z - max z))) - (z_t - max z)
    gradient  g (softmax(z) - 1[t]), times 1 - (z / c)^2 where a cap c bends z

Where rows have temperatures, z is divided by its row's after the cap. The caller divides g.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmpack.kernel_operators import OPERATORS, define

__all__ = ["OPERATORS", "gradients_formula", "losses_formula"]


def _wide(logits: Tensor, cap: float) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.tanh(wide / cap) * cap if cap else wide


def _divided(wide: Tensor, temperatures: Tensor | None) -> Tensor:
    return wide if temperatures is None else wide / temperatures[:, None]


def losses_formula(
    logits: Tensor, targets: Tensor, cap: float, temperatures: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of some rows.

    Args:
        logits: (l, V).
        targets: (l,) int64, each in [0, V).
        cap: bound of the logits; 0 for none.
        temperatures: (l,) float32; None for 1.

    Returns:
        (l,) each, in float32 or wider: the losses, the largest logits, and the logarithms of the
        sums of exponentials. The last two stay apart, since a sum would lose the small one.
    """
    wide = _divided(_wide(logits, cap), temperatures)
    peaks = wide.amax(dim=-1)
    shifted = wide - peaks[:, None]
    log_sums = shifted.exp().sum(dim=-1).log()
    return log_sums - shifted.gather(1, targets[:, None]).squeeze(1), peaks, log_sums


def gradients_formula(
    logits: Tensor,
    targets: Tensor,
    peaks: Tensor,
    log_sums: Tensor,
    grads: Tensor,
    cap: float,
    temperatures: Tensor | None,
) -> None:
    """Write the gradients over the logits.

    Args:
        logits: (l, V), before the cap.
        peaks, log_sums: (l,) of `losses_formula`.
        grads: (l,) of the losses, each by its row's temperature.
        temperatures: as of `losses_formula`.
    """
    wide = _wide(logits, cap)
    made = (_divided(wide, temperatures) - peaks[:, None] - log_sums[:, None]).exp()
    made.scatter_add_(1, targets[:, None], torch.full_like(peaks, -1)[:, None])
    made *= grads[:, None]
    logits.copy_(made * (1 - (wide / cap).square()) if cap else made)


define(
    "label_losses(Tensor logits, Tensor targets, float cap, Tensor? temperatures) -> "
    "(Tensor, Tensor, Tensor)",
    losses_formula,
    "vlmpack.backends.label_kernels",
    "launch_losses",
)
define(
    "label_gradients(Tensor(a!) logits, Tensor targets, Tensor peaks, Tensor log_sums, "
    "Tensor grads, float cap, Tensor? temperatures) -> ()",
    gradients_formula,
    "vlmpack.backends.label_kernels",
    "launch_gradients",
)
