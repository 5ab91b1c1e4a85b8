"""The hf engine's AdamW, torch's or bitsandbytes', and where each keeps its moments.

A checkpoint has moments as the optimizer holds them. They are two float32 numbers for each element,
or 8-bit codes and a float32 scale for each block (2110.02861). Codes are not unpacked on the way,
because a block whose largest value is negative would not be packed the same way again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata, util
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.boxes import Kind
from vlmpack.backends.policy import ParameterPolicy
from vlmpack.errors import CapabilityError
from vlmpack.recipe.trainable import BITSANDBYTES, OptimSection

TORCHS: Mapping[Kind, str] = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
PACKAGES: Mapping[Kind, str] = {
    "exp_avg": "state1",
    "exp_avg_sq": "state2",
    "exp_avg_scale": "absmax1",
    "exp_avg_sq_scale": "absmax2",
}
"""What is in a checkpoint -> its key in the optimizer's state of a parameter."""


def set_learning_rate(groups: Iterable[dict[str, Any]], lr: float) -> None:
    """Set the schedule's learning rate, times each group's own factor."""
    for group in groups:
        group["lr"] = lr * group["lr_scale"]


def build_optimizer(
    parameters: Sequence[tuple[str, nn.Parameter]],
    optim: OptimSection,
    *,
    policy_of: Callable[[str, int], ParameterPolicy],
    seed: int = 0,
    taken: Callable[[], int] = int,
) -> torch.optim.Optimizer:
    """Build the recipe's AdamW. torch's updates all tensors, shards too, by one kernel.

    It has two parameter groups for each component (1711.05101). Weights decay, biases and norms do
    not (`vlmpack.backends.policy` says why LoRA matrices do). Besides torch's own keys a group has
    `lr_scale`, which `set_learning_rate` reads.

    Args:
        optim: the learning rate in it is not used; the schedule sets it every step.
        seed, taken: of the run and its steps, for rounding.

    Raises:
        CapabilityError: its package is not installed, or too old.
    """
    members: dict[ParameterPolicy, list[nn.Parameter]] = {}
    for name, parameter in parameters:
        members.setdefault(policy_of(name, parameter.ndim), []).append(parameter)
    groups = [
        {
            "params": members[said],
            "weight_decay": optim.weight_decay if said.decays else 0.0,
            "lr_scale": said.lr_scale,
            "component": said.component,
        }
        for said in sorted(members, key=lambda said: (said.component, not said.decays))
    ]
    given: dict[str, Any] = {"lr": 0.0, "betas": optim.betas, "eps": optim.eps}
    if optim.rounds:
        from vlmpack.backends.hf.rounded_adamw import RoundedAdamW

        return RoundedAdamW(groups, seed=seed, taken=taken, fused=True, **given)
    if optim.facts.is_torchs:
        return torch.optim.AdamW(groups, fused=True, **given)
    require_bitsandbytes(f"optim.name: '{optim.name}'", "adamw")
    from bitsandbytes.optim import AdamW

    bits = 8 if optim.facts.in_8_bits else 32
    made: torch.optim.Optimizer = AdamW(
        groups, optim_bits=bits, is_paged=optim.facts.paged, **given
    )
    return made


def require_bitsandbytes(who: str, instead: str) -> None:
    """Raise CapabilityError where it is not installed, or too old."""
    least = BITSANDBYTES.partition(">=")[2]
    if util.find_spec("bitsandbytes") is None:
        found = "which is not installed"
    else:
        there = metadata.version("bitsandbytes")
        if [*map(int, there.split(".")[:2])] >= [*map(int, least.split("."))]:
            return
        found = f"here is {there}"
    raise CapabilityError(
        f"{who} needs bitsandbytes {least} or newer, {found}; pip install '{BITSANDBYTES}', or use "
        f"{instead}"
    )


def moments_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[Kind, Tensor]:
    """The moments of a parameter where they lie; zeros if it had no gradient yet."""
    state = optimizer.state.get(parameter) or _fresh_state(optimizer, parameter, steps=0)
    keys = TORCHS if isinstance(optimizer, torch.optim.AdamW) else PACKAGES
    return {kind: state[key] for kind, key in keys.items() if key in state}


def start_moments(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, *, steps: int
) -> dict[Kind, Tensor]:
    """Room for the moments of a parameter, zeros, which have seen that many steps."""
    optimizer.state[parameter] = _fresh_state(optimizer, parameter, steps=steps)
    return moments_of(optimizer, parameter)


def _fresh_state(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, *, steps: int
) -> dict[str, Any]:
    """The state of a parameter that has seen no gradient."""
    if isinstance(optimizer, torch.optim.AdamW):
        # A fused AdamW keeps its step count on the weights' device.
        count = torch.tensor(float(steps), device=parameter.device)
        zeros = {key: torch.zeros_like(parameter, requires_grad=False) for key in TORCHS.values()}
        return {"step": count, **zeros}
    number, place = next(
        (number, place)
        for number, group in enumerate(optimizer.param_groups)
        for place, one in enumerate(group["params"])
        if one is parameter
    )
    package: Any = optimizer
    package.init_state(package.param_groups[number], parameter, number, place)
    state: dict[str, Any] = optimizer.state.pop(parameter)
    state["step"] = steps
    return state
