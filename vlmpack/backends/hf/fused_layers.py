"""Fused norms, gated MLPs and rotations in a transformers model, recognised by what they compute.

A module is recognised if its own forward pass, on a small copy with random weights, computes a
known form. It must agree in float32 up to rounding, and in bfloat16 nearly bit for bit, which shows
where it rounds. Class names play no part. A module that is not recognised keeps its forward. A
recognised one becomes a subclass with another `forward`, so parameters, their names, hooks and
exports stay the same.

Every modeling module of transformers has its own function that rotates queries and keys, called by
its global name. Such a function is recognised in the same way, on random heads. cos and sin come
from the model, so packed rows, several position axes and scaled frequencies need nothing here. Only
the second half of cos must repeat the first, which is checked on the model's rotary modules. The
attention module gets a subclass whose `forward` is the same code with other globals. The modeling
module, and other models from it, are not changed.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.fused import (
    ACTIVATIONS,
    FORMS,
    Activation,
    FusedOps,
    NormForm,
    Rotate,
    rotated,
)

_DIM = "unsqueeze_dim"
_KINDS = (("q", "k", "cos", "sin"), ("x", "cos", "sin"))
"""What functions take first, of both and of one of them."""
_WRONG = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError)
"""What a function or a module that we do not know may raise when it is called."""


def _tried(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What it returns, without a graph; None where it cannot be called so."""
    try:
        with torch.no_grad():
            return function(*args, **options)
    except _WRONG:
        return None


@dataclass(frozen=True, slots=True)
class Rotation:
    """How a function of a modeling module rotates.

    Args:
        heads: how many tensors of heads are its first arguments.
        dim: the axis at which it inserts a heads dimension into cos; None where callers may choose.
        wide: whether it computes in float32 whatever the dtype of cos.
    """

    own: Callable[..., Any]
    heads: int
    dim: int | None
    wide: bool

    def fused(self, rotate: Rotate) -> Callable[..., Any]:
        """A function for the same calls."""
        given = inspect.signature(self.own)

        def turn(*args: Any, **options: Any) -> Any:
            bound = given.bind(*args, **options)
            bound.apply_defaults()
            *tensors, cos, sin = bound.args[: self.heads + 2]
            dim = self.dim if self.dim is not None else bound.arguments[_DIM]
            turned = self._turned(rotate, tensors, cos, sin, dim)
            if turned is None:
                return self.own(*args, **options)
            return turned[0] if self.heads == 1 else tuple(turned)

        return turn

    def _turned(
        self, rotate: Rotate, tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, dim: int
    ) -> list[Tensor] | None:
        """Rotated heads, each in its own dtype; None for calls of other shapes and dtypes.

        Heads come before or after tokens, of a row or of several. Where cos is wider, the attention
        that follows would round to the dtype of the values.
        """
        if self.wide:
            cos, sin = cos.float(), sin.float()
        axis = dim if dim < 0 else dim - cos.ndim - 1
        if axis not in (-3, -2):
            return None
        rows = [x.transpose(-3, -2) if axis == -3 else x for x in tensors]
        several = rows[0].ndim == 4
        rows = rows if several else [x[None] for x in rows]
        cos, sin = (part if part.ndim == 3 else part[None] for part in (cos, sin))
        if not all(_fits(x, cos, sin) for x in rows):
            return None
        turned = rotate(rows, cos, sin)
        turned = turned if several else [x[0] for x in turned]
        return [x.transpose(-3, -2) if axis == -3 else x for x in turned]


def _fits(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    if x.ndim != 4 or cos.ndim != 3 or cos.shape != sin.shape:
        return False
    (rows, tokens, _, width), (cos_rows, angles, turned) = x.shape, cos.shape
    alike = cos_rows in (1, rows) and angles == tokens
    narrow = torch.promote_types(x.dtype, cos.dtype) == cos.dtype == sin.dtype
    return alike and narrow and turned <= width and turned % 2 == 0


def rotation_of(function: Any) -> Rotation | None:
    """How a function rotates. None for another formula or other arguments."""
    names = tuple(inspect.signature(function).parameters)
    kind = next((kind for kind in _KINDS if names in (kind, (*kind, _DIM))), None)
    if kind is None:
        return None
    heads, takes_dim = len(kind) - 2, _DIM in names
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 7, count, 12, generator=draw) for count in (3, 1)[:heads]]
    wide = set()
    for width in (12, 8):  # the whole head, or a part of it, which not every function can
        angle = torch.randn(2, 7, width // 2, generator=draw).repeat(1, 1, 2)
        cos, sin = angle.cos(), angle.sin()
        out = _of(function, tensors, cos, sin, takes_dim=takes_dim)
        if out is None and width < 12:
            continue
        expected = [rotated(x, cos, sin) for x in tensors]
        if out is None or not _alike(out, expected, 0.0):
            return None
        wide.add(_rounds_once(function, tensors, cos, sin, takes_dim=takes_dim))
    if len(wide) != 1:
        return None
    return Rotation(function, heads, None if takes_dim else -2, wide.pop())


def _of(
    function: Any, tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, *, takes_dim: bool
) -> list[Tensor] | None:
    """What it makes of them; None where it cannot be called so."""
    out = _tried(function, *tensors, cos, sin, **({_DIM: 2} if takes_dim else {}))
    if out is None:
        return None
    out = [out] if isinstance(out, Tensor) else list(out)
    fits = [x.shape for x in out] == [x.shape for x in tensors]
    return out if fits else None


def _alike(got: Sequence[Tensor], expected: Sequence[Tensor], share: float) -> bool:
    """Whether no more than a share of the numbers differs by more than float32's rounding."""
    pairs = zip(got, expected, strict=True)
    differ = [
        (~torch.isclose(a.float(), b.float(), rtol=1e-5, atol=1e-6)).float() for a, b in pairs
    ]
    return all(part.mean().item() <= share for part in differ)


def _rounds_once(
    function: Any, tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, *, takes_dim: bool
) -> bool:
    """Whether bfloat16 heads and angles are rotated in float32; if not, products are rounded."""
    low = [x.bfloat16() for x in tensors]
    cos, sin = cos.bfloat16(), sin.bfloat16()
    out = _of(function, low, cos, sin, takes_dim=takes_dim)
    return out is not None and _alike(
        out, [rotated(x, cos.float(), sin.float()) for x in low], 0.01
    )


def _calls_of(kind: type[nn.Module]) -> tuple[dict[str, Any], bool]:
    """The functions of cos and sin that a class's `forward` calls by global names, and whether they
    can be replaced.

    They can if each decorator around `forward` calls what it has in its closure.
    """
    forward: Any = kind.forward
    inner: Any = inspect.unwrap(forward)
    code, known = getattr(inner, "__code__", None), getattr(inner, "__globals__", {})
    callables = {name: known[name] for name in getattr(code, "co_names", ()) if name in known}
    callables = {name: value for name, value in callables.items() if inspect.isfunction(value)}
    return {
        name: value
        for name, value in callables.items()
        if {"cos", "sin"} <= set(inspect.signature(value).parameters)
    }, _around(forward) is not None


def _around(forward: Any) -> list[tuple[FunctionType, int]] | None:
    """The decorators around a function, the outermost first, each with the cell of its closure that
    has what it wraps: transformers renames arguments by such. None where one is of another kind."""
    found: list[tuple[FunctionType, int]] = []
    while (inner := getattr(forward, "__wrapped__", None)) is not None:
        cells = getattr(forward, "__closure__", None) or ()
        places = [place for place, cell in enumerate(cells) if cell.cell_contents is inner]
        if not isinstance(forward, FunctionType) or len(places) != 1:
            return None
        found.append((forward, places[0]))
        forward = inner
    return found


def _copied(
    function: FunctionType, known: dict[str, Any], closure: tuple[CellType, ...] | None
) -> FunctionType:
    """The same code with other globals and another closure."""
    made = FunctionType(function.__code__, known, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__, made.__doc__ = function.__kwdefaults__, function.__doc__
    made.__annotations__, made.__qualname__ = function.__annotations__, function.__qualname__
    return made


def _with(kind: type[nn.Module], replaced: Mapping[str, Any]) -> type[nn.Module]:
    """A subclass whose `forward` finds these where it looks for globals of those names."""
    own: Any = inspect.unwrap(kind.forward)
    forward = _copied(own, {**own.__globals__, **replaced}, own.__closure__)
    for wrapper, place in reversed(_around(kind.forward) or []):
        cells = [*(wrapper.__closure__ or ())]
        cells[place] = CellType(forward)
        wrapped = _copied(wrapper, wrapper.__globals__, tuple(cells))
        wrapped.__wrapped__ = forward  # type: ignore[attr-defined]
        forward = wrapped
    body = {"__module__": kind.__module__, "forward": forward}
    return type(f"Fused{kind.__name__}", (kind,), body)


def repeats_halves(rotary: Any) -> bool | None:
    """Whether the second halves of a rotary module's cos and sin repeat the first.

    A copy made from its config is asked about drawn positions. None if there can be no such copy.
    """
    names = list(inspect.signature(type(rotary).forward).parameters)[1:]
    if names[:2] != ["x", "position_ids"] or names[2:] not in ([], ["layer_type"]):
        return None
    answers = []
    with torch.no_grad(), torch.device("cpu"):
        for positions in _positions():
            for kind in sorted(set(rotary.config.layer_types)) if names[2:] else [None]:
                try:
                    made = type(rotary)(rotary.config)
                    parts = made(torch.zeros(1), positions, *([kind] if kind else []))
                    first, second = zip(*(part.chunk(2, dim=-1) for part in parts), strict=True)
                except _WRONG:
                    continue
                answers.append(all(map(torch.equal, first, second)))
    return all(answers) if answers else None


def _positions() -> Iterator[Tensor]:
    """Positions of a row, by axes or one for all, and of patches by height and width."""
    draw = torch.Generator().manual_seed(0)
    for shape in ((3, 1, 6), (1, 6), (6, 2), (1, 6, 2)):
        yield torch.randint(0, 9, shape, generator=draw)


def fuse_rotations(model: nn.Module, ops: FusedOps) -> tuple[int, Counter[str]]:
    """Give every attention module whose rotation is recognised the fused one.

    Returns:
        How many modules, and those that keep their own rotation, by class.
    """
    by_name = {
        name: bool(repeats_halves(module))
        for name, module in model.named_modules()
        if any(each.endswith("inv_freq") for each, _ in module.named_buffers(recurse=False))
    }
    known: dict[tuple[type, bool], type | None] = {}
    count, unfused = 0, Counter[str]()
    for name, module in list(model.named_modules()):
        kind: Any = type(module)
        repeats = _nearest(name, by_name)
        if (kind, repeats) not in known:
            known[kind, repeats] = _fused_class(kind, ops, repeats=repeats)
        fused: Any = known[kind, repeats]
        if fused is not None:
            module.__class__ = fused
            count += 1
        elif _calls_of(kind)[0]:
            unfused[kind.__name__] += 1
    return count, unfused


def _nearest(name: str, by_name: Mapping[str, bool]) -> bool:
    """The answer of the rotary modules in the smallest part of the model that has this module and
    any of them: a tower's, or the language model's."""
    while name:
        name = name.rpartition(".")[0]
        answers = [a for other, a in by_name.items() if not name or other.startswith(f"{name}.")]
        if answers:
            return all(answers)
    return False


def _fused_class(kind: type[nn.Module], ops: FusedOps, *, repeats: bool) -> type[nn.Module] | None:
    functions, is_plain = _calls_of(kind)
    if not functions or not is_plain or not repeats or ops.rotate is None:
        return None
    rotations = {name: rotation_of(function) for name, function in functions.items()}
    replaced = {
        name: each.fused(ops.rotate) for name, each in rotations.items() if each is not None
    }
    return _with(kind, replaced) if len(replaced) == len(functions) else None


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
    out = _tried(module, x)
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
    """The number of norms, gated MLPs and rotations that were replaced.

    Args:
        left: modules that keep their own forward, by class.
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
    """Replace every recognised norm, gated MLP and rotation by a fused form.

    Adapters are added afterwards.
    """
    known: dict[Any, Any] = {}
    norms, mlps, unfused = 0, 0, Counter[str]()
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
                unfused[type(module).__name__] += 1
        rotations, others = fuse_rotations(model, ops)
    return Fused(norms, mlps, rotations, unfused + others)


def describe_fused(model: nn.Module, ops: FusedOps | None, why: str) -> str:
    """Run `fuse_layers` if there are fused operators. Returns what was done, for the log."""
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
