"""Fused norms, gated MLPs and rotations in a transformers model, recognised by what they compute.

A module is recognised if its own forward pass, on a small copy with random weights, computes a
known form. It must agree in float32 up to rounding, and in bfloat16 nearly bit for bit, which shows
where it rounds. Class names play no part. A module that is not recognised keeps its forward. A
recognised one becomes a subclass with another `forward`, so parameters, their names, hooks and
exports stay the same.

Under autocast a stock norm makes float32 of float32 weights, and each product behind it casts that
once more. A norm whose output only products read makes their dtype at once, with the same numbers.
`read_by_products` tells which by running a block with stand-ins for its parts. A norm whose output
is added to anything keeps the stock dtype, as those behind attention in Gemma do. `group_products`
sees to it that gradients of several products are added in float32, as those of stock norms are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.even_width import even_mlp, is_uneven_mlp
from vlmpack.backends.fused import ACTIVATIONS, Activation, FusedOps
from vlmpack.backends.hf.fused_rotation import (
    KINDS,
    MLPS,
    NORMS,
    ROTATIONS,
    Ran,
    autocast_dtype,
    fuse_rotations,
)
from vlmpack.backends.hf.probes import read_by_products, small_copy, tried
from vlmpack.backends.row_operators import FORMS, WIDEST, NormForm
from vlmpack.kernel_operators import is_plain

_EPS = ("variance_epsilon", "eps")
_WIDTH = 64
_LINEARS = {"gate_proj", "up_proj", "down_proj"}


@dataclass(frozen=True, slots=True)
class _NormKernel:
    """How a norm that was recognised runs.

    Args:
        form: and epsilon.
        narrows: whether only matrix products read its output.
    """

    ops: FusedOps
    form: tuple[NormForm, float]
    narrows: bool
    ran: Ran


class _FusedNorm:
    """The `forward` of a norm that was recognised."""

    fused: _NormKernel
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        if is_plain():
            own: Tensor = super().forward(hidden_states)  # type: ignore[misc]
            return own
        fused = self.fused
        (form, eps), ran = fused.form, fused.ran
        dtype = autocast_dtype(hidden_states) if fused.narrows else None
        ran.add(NORMS, self)
        return fused.ops.norm(hidden_states, self.weight, eps, form, dtype)


class _FusedMLP:
    """The `forward` of a gated MLP that was recognised; its linear layers may carry adapters."""

    fused: tuple[FusedOps, Activation, Ran]
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, hidden_state: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        if is_plain():
            own: Tensor = super().forward(hidden_state)  # type: ignore[misc]
            return own
        dtype = autocast_dtype(hidden_state) or hidden_state.dtype
        if is_uneven_mlp(self, hidden_state, dtype):
            return even_mlp(self, hidden_state, dtype, self._product)
        product = self._product(self.gate_proj(hidden_state), self.up_proj(hidden_state))
        output: Tensor = self.down_proj(product)
        return output

    def _product(self, gate: Tensor, up: Tensor) -> Tensor:
        ops, activation, ran = self.fused
        if gate.dtype is not up.dtype or ops.gated is None:
            return ACTIVATIONS[activation](gate) * up
        ran.add(MLPS, self)
        return ops.gated(gate, up, activation)


@cache
def _derived(mixin: type, own: type) -> type:
    return type(f"Fused{own.__name__}", (mixin, own), {"__module__": own.__module__})


def _called(module: nn.Module, x: Tensor) -> Tensor | None:
    """What a module that we do not know makes of x; None where it cannot be called so."""
    out = tried(module, x)
    return out if isinstance(out, Tensor) and out.shape == x.shape else None


def _takes_one(module: nn.Module) -> bool:
    return len(signature(type(module).forward).parameters) == 2  # self and its input


def norm_form(module: nn.Module) -> tuple[NormForm, float] | None:
    """The form and epsilon of an RMS norm; None for every other module."""
    values = [getattr(module, name) for name in _EPS if hasattr(module, name)]
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or [*module.children(), *module.buffers()]:
        return None
    if not values or not isinstance(values[0], float) or not _takes_one(module):
        return None
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):  # one kernel each in torch
        return None
    eps = values[0]
    if next(module.parameters()).numel() > WIDEST:
        return None
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(_WIDTH, generator=draw)
    # Some rows are so small that epsilon decides.
    x = torch.randn(64, _WIDTH, generator=draw) * torch.logspace(-4, 1, 64)[:, None]
    small = small_copy(module, weight=nn.Parameter(weight))
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
    small = small_copy(
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
    """The modules that were replaced.

    Args:
        modules: by kind: norms, gated MLPs, and attention for its rotation.
        left: modules that keep their own forward, by class.
        narrowed: how many norms make the dtype of products under autocast.
    """

    modules: Mapping[str, Collection[nn.Module]]
    left: Counter[str]
    narrowed: int
    ran: Ran
    ops: FusedOps

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Note which of them run their kernel in a step, so that `described` can say it."""

        def enter(module: nn.Module, _: Any) -> None:
            self.ran.within = module

        hooks = [module.register_forward_pre_hook(enter) for module in self.modules[ROTATIONS]]
        self.ran.recording = True
        try:
            yield
        finally:
            self.ran.recording, self.ran.within = False, None
            for hook in hooks:
                hook.remove()
        self.ran.counted = True

    def described(self) -> str:
        """Those whose kernel ran while they were counted, for the log."""
        chosen = f"{self.ops.name} ({self.ops.reason})"
        if not self.ran.counted:
            return f"{chosen}: counted in the first step"
        return f"{chosen}: {self._counts()}"

    def _counts(self) -> str:
        ran = {kind: len(self.ran.modules[kind]) for kind in KINDS}
        idle = {kind: len(self.modules[kind]) - ran[kind] for kind in KINDS}
        parts = (
            ("", ran),
            ("did not run: ", {kind: count for kind, count in idle.items() if count}),
            ("own forward: ", {name: self.left[name] for name in sorted(self.left)}),
        )
        return "; ".join(
            said + ", ".join(f"{count} {name}" for name, count in counts.items())
            for said, counts in parts
            if counts
        )


def fuse_layers(model: nn.Module, ops: FusedOps, *, narrow: bool = True) -> Fused:
    """Replace every recognised norm, gated MLP and rotation by a fused form.

    Adapters are added afterwards.

    Args:
        narrow: whether norms may make the dtype of products. What reads them is known by names,
            which hold in the families that tests see.
    """
    known: dict[Any, Any] = {}
    norms, mlps, unfused = list[nn.Module](), list[nn.Module](), Counter[str]()
    ran, modules = Ran(), list(model.modules())
    with torch.random.fork_rng(devices=[]):
        forms = {id(module): _once(known, norm_form, module) for module in modules}
        narrowed = _narrow_norms(known, modules, forms) if narrow else set()
        for module in modules:
            form = forms[id(module)]
            activation = _once(known, mlp_activation, module) if form is None else None
            changed: Any = module
            kind: Any = type(module)
            if form is not None:
                changed.fused = _NormKernel(ops, form, id(module) in narrowed, ran)
                changed.__class__ = _derived(_FusedNorm, kind)
                norms.append(module)
            elif activation is not None and ops.gated is not None:
                changed.fused = (ops, activation, ran)
                changed.__class__ = _derived(_FusedMLP, kind)
                mlps.append(module)
            elif _looks_like_one(module):
                unfused[kind.__name__] += 1
        rotations, others = fuse_rotations(model, ops, ran)
    found = dict(zip(KINDS, (norms, mlps, rotations), strict=True))
    return Fused(found, unfused + others, len(narrowed), ran, ops)


def _narrow_norms(
    known: dict[Any, Any], modules: Sequence[nn.Module], forms: Mapping[int, Any]
) -> set[int]:
    """The norms whose output products alone read, in every block that has them."""
    answers: dict[int, bool] = {}
    for block in modules:
        for name, norm in block.named_children():
            if forms[id(norm)] is not None:
                width = next(norm.parameters()).numel()
                ask = partial(read_by_products, name=name, width=width)
                answer = _once(known, ask, block, (name, width))
                answers[id(norm)] = answers.get(id(norm), True) and answer
    return {norm for norm, narrows in answers.items() if narrows}


def _looks_like_one(module: nn.Module) -> bool:
    gated = {name for name, _ in module.named_children()} >= _LINEARS
    return gated or "RMSNorm" in type(module).__name__


def _once(
    known: dict[Any, Any], ask: Callable[[nn.Module], Any], module: nn.Module, name: Any = None
) -> Any:
    """The answer for modules of one class, one set of settings and one width is one answer."""
    settings = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str)}
    act = getattr(module, "act_fn", None)
    own = tuple((name, each.shape) for name, each in module.named_parameters(recurse=False))
    parts = tuple((name, type(part)) for name, part in module.named_modules())
    key = (name or ask, own, parts, repr(sorted(settings.items())), repr(act))
    if key not in known:
        known[key] = ask(module)
    return known[key]
