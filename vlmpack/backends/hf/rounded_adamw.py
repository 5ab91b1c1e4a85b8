"""AdamW that holds weights and moments of linear layers in bfloat16, with stochastic rounding.

A step of AdamW is about the learning rate. The spacing of bfloat16 at 0.02 is 1.2e-4, so rounding
to the nearest undoes every step of 2e-5. Stochastic rounding goes up with a probability that is the
share of the way to the next number, so the mean of many steps is exact (2010.06192).

    number, float32 -> bits + a random number of 16 bits -> the upper 16 bits

Random numbers follow from the run's seed and the optimizer step, so a resumed run draws the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 1 << 24
"""Elements of a tensor that are computed at once, in float32, or the fewest rows of it."""


def rounded(exact: Tensor, draws: torch.Generator) -> Tensor:
    """Numbers of float32 that bfloat16 holds, below or above `exact`, whose mean is `exact`.

    Infinity stays, and NaN, whose bits a sum would make those of a number.
    """
    noise = torch.randint(
        1 << 16, exact.shape, dtype=torch.int32, device=exact.device, generator=draws
    )
    made = noise.add_(exact.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(exact.isnan(), exact, made)


class RoundedAdamW(torch.optim.AdamW):
    """torch's AdamW for parameters in float32, and the same with rounding for those in bfloat16.

    Args:
        seed: of the run.
        taken: how many optimizer steps the run has taken.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        seed: int,
        taken: Callable[[], int],
        **given: Any,
    ) -> None:
        super().__init__(groups, **given)
        self.seed, self.taken = seed, taken

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        held = [
            (parameter, parameter.grad, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.dtype is torch.bfloat16 and parameter.grad is not None
        ]
        for parameter, _, _ in held:  # torch's would round to the nearest
            parameter.grad = None
        super().step(closure)
        generators: dict[torch.device, torch.Generator] = {}
        for parameter, gradient, group in held:
            parameter.grad = gradient
            if parameter.device not in generators:
                made = torch.Generator(device=parameter.device)
                generators[parameter.device] = made.manual_seed((self.seed << 31) + self.taken())
            self._update(parameter, gradient, group, generators[parameter.device])

    def _update(
        self,
        parameter: nn.Parameter,
        gradient: Tensor,
        group: dict[str, Any],
        draws: torch.Generator,
    ) -> None:
        state, lr, (beta1, beta2) = self.state[parameter], group["lr"], group["betas"]
        if not state:
            zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            state.update(step=torch.zeros((), device=parameter.device), **zeros)
        state["step"] += 1
        rate = lr / (1 - beta1 ** state["step"])
        spread = (1 - beta2 ** state["step"]).sqrt()
        tensors = (parameter, state["exp_avg"], state["exp_avg_sq"], gradient)
        # By rows: a flat tensor is a copy where numbers do not lie one after the other.
        slices = [torch.atleast_1d(tensor) for tensor in tensors]
        rows = max(1, CHUNK * len(slices[0]) // max(1, parameter.numel()))
        for parts in zip(*(tensor.split(rows) for tensor in slices), strict=True):
            weight, mean, square, part = (each.float() for each in parts)
            weight.mul_(1 - lr * group["weight_decay"])
            mean.lerp_(part, 1 - beta1)
            square.mul_(beta2).addcmul_(part, part, value=1 - beta2)
            weight.sub_(square.sqrt().div_(spread).add_(group["eps"]).reciprocal_() * mean * rate)
            for place, exact in zip(parts, (weight, mean, square), strict=False):
                place.copy_(rounded(exact, draws))
