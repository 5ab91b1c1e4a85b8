"""The losses of rows of logits and their gradients, each as one operator of torch.

    vlmpack::label_losses      logits, targets -> the losses, and what the gradients need
    vlmpack::label_gradients   the gradients, written over the logits

On CUDA an operator is a Triton kernel (`label_kernels.py`), which reads each logit once, in the
dtype of the product that made it. Elsewhere it is the formula, with z for the logits and t for the
target:

    loss      log(sum(exp(z - max z))) - (z_t - max z)
    gradient  g (softmax(z) - 1[t]), times 1 - (z / c)^2 where a cap c bends z
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _wide(logits: Tensor, cap: float) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.tanh(wide / cap) * cap if cap else wide


def losses_formula(logits: Tensor, targets: Tensor, cap: float) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of some rows.

    Args:
        logits: (l, V).
        targets: (l,) int64, each in [0, V).
        cap: bound of the logits; 0 for none.

    Returns:
        (l,) each, in float32 or wider: the losses, the largest logits, and the logarithms of the
        sums of exponentials. The last two stay apart, since a sum would lose the small one.
    """
    wide = _wide(logits, cap)
    peaks = wide.amax(dim=-1)
    shifted = wide - peaks[:, None]
    log_sums = shifted.exp().sum(dim=-1).log()
    return log_sums - shifted.gather(1, targets[:, None]).squeeze(1), peaks, log_sums


def gradients_formula(
    logits: Tensor, targets: Tensor, peaks: Tensor, log_sums: Tensor, grads: Tensor, cap: float
) -> None:
    """Write the gradients over the logits.

    Args:
        logits: (l, V), before the cap.
        peaks, log_sums: (l,) of `losses_formula`.
        grads: (l,) of the losses.
    """
    wide = _wide(logits, cap)
    made = (wide - peaks[:, None] - log_sums[:, None]).exp()
    made.scatter_add_(1, targets[:, None], torch.full_like(peaks, -1)[:, None])
    made *= grads[:, None]
    logits.copy_(made * (1 - (wide / cap).square()) if cap else made)


def _kernel(name: str) -> Any:
    def launch(*args: Any) -> Any:
        from vlmpack.backends import label_kernels  # Triton is there where CUDA is

        return getattr(label_kernels, name)(*args)

    return launch


_LIBRARY = torch.library.Library("vlmpack", "FRAGMENT")
for _schema, _formula, _launch in (
    (
        "label_losses(Tensor logits, Tensor targets, float cap) -> (Tensor, Tensor, Tensor)",
        losses_formula,
        "launch_losses",
    ),
    (
        "label_gradients(Tensor(a!) logits, Tensor targets, Tensor peaks, Tensor log_sums, "
        "Tensor grads, float cap) -> ()",
        gradients_formula,
        "launch_gradients",
    ),
):
    _name = _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _formula, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _kernel(_launch), "CUDA")
OPERATORS: Any = torch.ops.vlmpack
