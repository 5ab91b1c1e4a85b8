"""Fused rotations of queries and keys in a transformers model, recognised by what they compute.

Every modeling module of transformers has its own function that rotates queries and keys, called by
its global name. Such a function is recognised on random heads, as norms are (`fused_layers.py`).
cos and sin come from the model, so packed rows, several position axes and scaled frequencies need
nothing here. Only the second half of cos must repeat the first, which is checked on the model's
rotary modules. The attention module gets a subclass whose `forward` is the same code with other
globals. The modeling module, and other models from it, are not changed.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.fused import FusedOps, Rotate
from vlmpack.backends.hf.probes import WRONG, tried
from vlmpack.backends.row_operators import rotated
from vlmpack.kernel_operators import is_plain

_DIM = "unsqueeze_dim"
_KINDS = (("q", "k", "cos", "sin"), ("x", "cos", "sin"))
"""What functions take first, of both and of one of them."""


NORMS, MLPS, ROTATIONS = KINDS = ("norms", "gated MLPs", "rotations")


@dataclass(slots=True, eq=False)
class Ran:
    """The modules whose fused forward ran its kernel, while `recording`.

    Args:
        counted: whether a whole step was recorded.
        within: the attention module that runs now.
    """

    recording: bool = False
    counted: bool = False
    within: nn.Module | None = None
    modules: dict[str, set[int]] = field(default_factory=lambda: {kind: set() for kind in KINDS})

    def add(self, kind: str, module: Any) -> None:
        """Note that it ran."""
        if self.recording:
            self.modules[kind].add(id(module))


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What products make of x; None where they take it as it is."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


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

    def fused(self, rotate: Rotate, ran: Ran) -> Callable[..., Any]:
        """A function for the same calls."""
        given = inspect.signature(self.own).parameters
        defaults = {name: each.default for name, each in given.items()}
        names = tuple(given)[: self.heads + 2]

        def turn(*args: Any, **options: Any) -> Any:
            if is_plain():
                return self.own(*args, **options)
            bound = {**defaults, **dict(zip(given, args, strict=False)), **options}
            *tensors, cos, sin = [bound[name] for name in names]
            dim = self.dim if self.dim is not None else bound[_DIM]
            turned = self._turned(rotate, tensors, cos, sin, dim)
            if turned is None:
                return self.own(*args, **options)
            ran.add(ROTATIONS, ran.within)
            return turned[0] if self.heads == 1 else tuple(turned)

        return turn

    def _turned(
        self, rotate: Rotate, tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, dim: int
    ) -> list[Tensor] | None:
        """Rotated heads, each in its own dtype, under autocast in that of products; None for calls
        of other shapes and dtypes.

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
        cos, sin = [part if part.ndim == 3 else part[None] for part in (cos, sin)]
        alike = len({(*x.shape[:2], x.shape[-1]) for x in rows}) == 1
        if not alike or not all(_fits(x, cos, sin) for x in rows):
            return None
        turned = rotate(rows, cos, sin, autocast_dtype(rows[0]))
        turned = turned if several else [x.squeeze(0) for x in turned]
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
    out = tried(function, *tensors, cos, sin, **({_DIM: 2} if takes_dim else {}))
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
                except WRONG:
                    continue
                answers.append(all(map(torch.equal, first, second)))
    return all(answers) if answers else None


def _positions() -> Iterator[Tensor]:
    """Positions of a row, by axes or one for all, and of patches by height and width."""
    draw = torch.Generator().manual_seed(0)
    for shape in ((3, 1, 6), (1, 6), (6, 2), (1, 6, 2)):
        yield torch.randint(0, 9, shape, generator=draw)


def fuse_rotations(
    model: nn.Module, ops: FusedOps, ran: Ran
) -> tuple[list[nn.Module], Counter[str]]:
    """Give every attention module whose rotation is recognised the fused one.

    Returns:
        These modules, and those that keep their own rotation, by class.
    """
    by_name = {
        name: bool(repeats_halves(module))
        for name, module in model.named_modules()
        if any(each.endswith("inv_freq") for each, _ in module.named_buffers(recurse=False))
    }
    known: dict[tuple[type, bool], type | None] = {}
    fused_ones, unfused = list[nn.Module](), Counter[str]()
    for name, module in list(model.named_modules()):
        kind: Any = type(module)
        repeats = _nearest(name, by_name)
        if (kind, repeats) not in known:
            known[kind, repeats] = _fused_class(kind, ops, ran, repeats=repeats)
        fused: Any = known[kind, repeats]
        if fused is not None:
            module.__class__ = fused
            fused_ones.append(module)
        elif _calls_of(kind)[0]:
            unfused[kind.__name__] += 1
    return fused_ones, unfused


def _nearest(name: str, by_name: Mapping[str, bool]) -> bool:
    """The answer of the rotary modules in the smallest part of the model that has this module and
    any of them: a tower's, or the language model's."""
    while name:
        name = name.rpartition(".")[0]
        answers = [a for other, a in by_name.items() if not name or other.startswith(f"{name}.")]
        if answers:
            return all(answers)
    return False


def _fused_class(
    kind: type[nn.Module], ops: FusedOps, ran: Ran, *, repeats: bool
) -> type[nn.Module] | None:
    functions, is_plain = _calls_of(kind)
    if not functions or not is_plain or not repeats:
        return None
    rotations = {name: rotation_of(function) for name, function in functions.items()}
    replaced = {
        name: each.fused(ops.rotate, ran) for name, each in rotations.items() if each is not None
    }
    return _with(kind, replaced) if len(replaced) == len(functions) else None
