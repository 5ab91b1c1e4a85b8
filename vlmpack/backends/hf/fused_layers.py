"""Fused norms and gated MLPs in a transformers model: which of its modules, told by what they do.
Rotations are in `fused_rotation`.

A module is taken for one of the known forms where its own forward pass, on a small copy with drawn
weights, is that form: in float32 to rounding, and in bfloat16 nearly bit for bit, so that where it
rounds is found out, too. Class names play no part. What is not recognised keeps its own forward.

The module stays the module: its class becomes a subclass of its own with another `forward`, so
parameters, their names, hooks and exports are as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.fused import ACTIVATIONS, FORMS, Activation, FusedOps, NormForm
from vlmpack.backends.hf.fused_rotation import fuse_rotations

_EPS = ("variance_epsilon", "eps")
_WIDTH = 64
_LINEARS = {"gate_proj", "up_proj", "down_proj"}
_OF_A_MODULE = frozenset(vars(nn.Module()))


class _FusedNorm:
    """The `forward` of a norm that was recognised."""

    fused: tuple[FusedOps, NormForm, float]
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        ops, form, eps = self.fused
        if form.rounds_first and hidden_states.dtype is not self.weight.dtype:
            # Under autocast the stock norm widens to the weight's dtype, which no kernel does.
            own: Tensor = super().forward(hidden_states)  # type: ignore[misc]
            return own
        return ops.norm(hidden_states, self.weight, eps, form)


class _FusedMLP:
    """The `forward` of a gated MLP that was recognised; its linear layers may carry adapters."""

    fused: tuple[FusedOps, Activation]
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, hidden_state: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        ops, activation = self.fused
        gate, up = self.gate_proj(hidden_state), self.up_proj(hidden_state)
        if gate.dtype is not up.dtype:
            product = ACTIVATIONS[activation](gate) * up
        else:
            product = ops.gated(gate, up, activation)
        output: Tensor = self.down_proj(product)
        return output


@cache
def _derived(mixin: type, own: type) -> type:
    return type(f"Fused{own.__name__}", (mixin, own), {"__module__": own.__module__})


def _small(module: nn.Module, **parts: Any) -> nn.Module:
    """A module of the same class and settings with other parameters and submodules."""
    made: nn.Module = type(module).__new__(type(module))
    nn.Module.__init__(made)
    made.__dict__.update({k: v for k, v in vars(module).items() if k not in _OF_A_MODULE})
    for name, part in parts.items():
        setattr(made, name, part)
    return made.eval()


def _called(module: nn.Module, x: Tensor) -> Tensor | None:
    """What a module that we do not know makes of x; None where it cannot be called so."""
    try:
        with torch.no_grad():
            out = module(x)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return None
    return out if isinstance(out, Tensor) and out.shape == x.shape else None


def _takes_one(module: nn.Module) -> bool:
    return len(signature(type(module).forward).parameters) == 2  # self and its input


def norm_form(module: nn.Module) -> tuple[NormForm, float] | None:
    """The form and epsilon of an RMS norm; None for every other module."""
    found = [getattr(module, name) for name in _EPS if hasattr(module, name)]
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or [*module.children(), *module.buffers()]:
        return None
    if not found or not isinstance(found[0], float) or not _takes_one(module):
        return None
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):  # one kernel each in torch
        return None
    eps = found[0]
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(_WIDTH, generator=draw)
    # Some rows are so small that epsilon decides.
    x = torch.randn(64, _WIDTH, generator=draw) * torch.logspace(-4, 1, 64)[:, None]
    small = _small(module, weight=nn.Parameter(weight))
    out = _called(small, x)
    if out is None:
        return None
    alike = [form for form in FORMS if torch.allclose(out, form.eager(x, weight, eps), rtol=1e-5)]
    low, weight_low = x.bfloat16(), weight.bfloat16()
    out = _called(small.bfloat16(), low)
    if out is None:
        return None
    differ = {
        form: (form.eager(low, weight_low, eps) != out).float().mean().item() for form in alike
    }
    same = [form for form, share in differ.items() if share < 0.01]
    apart = all(share > 0.05 for form, share in differ.items() if form not in same)
    return (same[0], eps) if len(same) == 1 and apart else None


def mlp_activation(module: nn.Module) -> Activation | None:
    """The activation of a gated MLP, down(activation(gate(x)) * up(x)); None for other modules."""
    children = dict(module.named_children())
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if not set(children) >= _LINEARS or set(children) - _LINEARS - {"act_fn"} or own:
        return None
    if not all(isinstance(children[name], nn.Linear) for name in _LINEARS):
        return None
    if not _takes_one(module):
        return None
    draw = torch.Generator().manual_seed(0)
    small = _small(
        module,
        gate_proj=_drawn(8, 24, draw),
        up_proj=_drawn(8, 24, draw),
        down_proj=_drawn(24, 8, draw),
        **({"act_fn": children["act_fn"]} if "act_fn" in children else {}),
    )
    x = 3 * torch.randn(32, 8, generator=draw)
    out = _called(small, x)
    if out is None:
        return None
    parts: Any = small
    for name, activation in ACTIVATIONS.items():
        with torch.no_grad():
            expected = parts.down_proj(activation(parts.gate_proj(x)) * parts.up_proj(x))
        if torch.allclose(out, expected, rtol=1e-5, atol=1e-6):
            return name
    return None


def _drawn(inner: int, outer: int, draw: torch.Generator) -> nn.Linear:
    made = nn.Linear(inner, outer)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return made


@dataclass(frozen=True, slots=True)
class Fused:
    """What was replaced.

    Args:
        norms: how many norms.
        mlps: how many gated MLPs.
        rotations: in how many attention modules.
        left: norms, gated MLPs and modules that rotate, told by their parts, that keep their own
            forward, by class.
    """

    norms: int
    mlps: int
    rotations: int
    left: Counter[str]

    def described(self) -> str:
        """For the log."""
        said = f"{self.norms} norms, {self.mlps} gated MLPs, {self.rotations} rotations"
        kept = ", ".join(f"{count} {name}" for name, count in sorted(self.left.items()))
        return f"{said}; own forward: {kept}" if kept else said


def fuse_layers(model: nn.Module, ops: FusedOps) -> Fused:
    """Give every norm, gated MLP and rotation of a model that is recognised a fused form, before
    adapters go in.

    Args:
        model: transformers'; vision tower and language model alike.
        ops: what runs them.
    """
    known: dict[Any, Any] = {}
    norms, mlps, left = 0, 0, Counter[str]()
    with torch.random.fork_rng(devices=[]):
        for module in list(model.modules()):
            form = _once(known, norm_form, module)
            activation = _once(known, mlp_activation, module) if form is None else None
            changed: Any = module
            kind: Any = type(module)
            if form is not None:
                changed.fused = (ops, *form)
                changed.__class__ = _derived(_FusedNorm, kind)
                norms += 1
            elif activation is not None:
                changed.fused = (ops, activation)
                changed.__class__ = _derived(_FusedMLP, kind)
                mlps += 1
            elif _looks_like_one(module):
                left[type(module).__name__] += 1
        rotations, others = fuse_rotations(model, ops)
    return Fused(norms, mlps, rotations, left + others)


def describe_fused(model: nn.Module, ops: FusedOps | None, why: str) -> str:
    """`fuse_layers` where there is something to do it with; what was done, for the log."""
    if ops is None:
        return f"none ({why})"
    return f"{ops.name} ({ops.reason}): {fuse_layers(model, ops).described()}"


def _looks_like_one(module: nn.Module) -> bool:
    gated = {name for name, _ in module.named_children()} >= _LINEARS
    return gated or "RMSNorm" in type(module).__name__


def _once(known: dict[Any, Any], ask: Callable[[nn.Module], Any], module: nn.Module) -> Any:
    """The answer for modules of one class and one set of settings is one answer."""
    settings = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str)}
    act = getattr(module, "act_fn", None)
    own = tuple(name for name, _ in module.named_parameters(recurse=False))
    children = tuple((name, type(child)) for name, child in module.named_children())
    key = (ask, type(module), own, children, repr(sorted(settings.items())), repr(act))
    if key not in known:
        known[key] = ask(module)
    return known[key]
