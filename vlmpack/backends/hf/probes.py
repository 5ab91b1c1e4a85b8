"""Copies of modules that are run to see what they compute, and who reads what they make."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Iterable
from inspect import signature
from textwrap import dedent
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

WRONG = (
    *(RuntimeError, TypeError, ValueError, AttributeError),
    *(IndexError, KeyError, AssertionError, ImportError),
)
"""What a function or a module that we do not know may raise when it is called."""


_OF_A_MODULE = frozenset(vars(nn.Module()))


def tried(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What it returns, without a graph; None where it cannot be called so."""
    try:
        with torch.no_grad():
            return function(*args, **options)
    except WRONG:
        return None


def small_copy(module: nn.Module, **parts: Any) -> nn.Module:
    """A module of the same class and settings with other parameters and submodules."""
    made: nn.Module = type(module).__new__(type(module))
    nn.Module.__init__(made)
    made.__dict__.update({k: v for k, v in vars(module).items() if k not in _OF_A_MODULE})
    for name, part in parts.items():
        setattr(made, name, part)
    return made.eval()


class _StandIn(nn.Module):
    """In the place of a block's part: gives fixed numbers, and notes what it is called with."""

    def __init__(self, name: str, gives: Tensor, calls: list[tuple[str, Any, Any]]) -> None:
        super().__init__()
        self.name, self.gives, self.calls = name, gives, calls
        self.weight = gives[0, 0]  # some blocks look at its dtype

    def forward(self, *args: Any, **options: Any) -> Tensor:
        self.calls.append((self.name, args, options))
        return self.gives


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_flatten(values)[0] if isinstance(each, Tensor)]


def read_by_products(block: nn.Module, name: str, width: int) -> bool:
    """Whether matrix products alone read what a norm of this block makes.

    A copy of the block runs with stand-ins for its parts. The norm's gives NaN, and others zeros.
    Then the very tensor must have been handed to parts that read it by products, and no NaN may be
    in what else was handed over or in what the block returns.

    Args:
        name: of the norm, a child of the block.
        width: of the norm's rows.
    """
    # Of two rows: what attention returns is a pair in some blocks, and unpacks as one.
    zeros = torch.zeros(2, 3, width)
    made, calls = torch.full_like(zeros, torch.nan), list[tuple[str, Any, Any]]()
    parts = {
        child: _StandIn(child, made if child == name else zeros, calls)
        for child, _ in block.named_children()
    }
    tensors = (*block.named_parameters(recurse=False), *block.named_buffers(recurse=False))
    copy = small_copy(block, **parts, **{own: torch.ones(value.shape) for own, value in tensors})
    taken = [*signature(type(block).forward).parameters.values()][2:]  # behind self and x
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    options = [each.name for each in taken if each.kind in named]
    needed = [each.name for each in taken if each.default is each.empty and each.kind in named]
    returned = tried(copy, zeros, **dict.fromkeys(needed))
    if returned is None:  # a layer with inputs of its own
        calls.clear()
        returned = tried(copy, zeros, **dict.fromkeys(options, zeros))
    outputs, handed = _tensors(returned), _tensors([call[1:] for call in calls])
    apart = [*outputs, *(each for each in handed if each is not made)]
    if not outputs or any(each.isnan().any() for each in apart):
        return False
    readers = [call for call in calls if any(each is made for each in _tensors(call[1:]))]
    return bool(readers) and all(
        _reads_by_products(
            block.get_submodule(reader),
            [
                *(place for place, each in enumerate(args) if each is made),
                *(key for key, each in given.items() if each is made),
            ],
        )
        for reader, args, given in readers
    )


class _ElsewhereError(Exception):
    """A part uses its input outside products."""


_ROWS, _DTYPE = "rows", "dtype"
_OF_SHAPE = {"shape", "size", "ndim", "dim", "device"}
_VIEWS = {"view", "reshape", "flatten", "unsqueeze", "squeeze", "transpose", "contiguous"}


def _is_linear(part: nn.Module) -> bool:
    return type(part).forward is nn.Linear.forward and "forward" not in vars(part)


def _reads_by_products(part: nn.Module, handed: Collection[int | str]) -> bool:
    """Whether a part only hands its input to `nn.Linear`.

    Its source is read, because attention cannot be called without a model around it. Every branch
    counts. A line that is not understood counts as a use outside products.

    Args:
        handed: the arguments that are the input, by place or by name.
    """
    if _is_linear(part):
        return True
    forward = inspect.unwrap(type(part).forward)
    try:
        (function,) = ast.parse(dedent(inspect.getsource(forward))).body
        assert isinstance(function, ast.FunctionDef) and "forward" not in vars(part)
        owner, *names = (each.arg for each in function.args.args)
        named = {each if isinstance(each, str) else names[each] for each in handed}
        assert named <= {*names, *(each.arg for each in function.args.kwonlyargs)}
        _Source(part, owner, forward).follow(function.body, dict.fromkeys(named, _ROWS))
    except (_ElsewhereError, OSError, SyntaxError, *WRONG):
        return False
    return True


class _Source:
    """The source of a part's `forward`, followed by the names that hold its input.

    Args:
        owner: the name of the part in it.
    """

    def __init__(self, part: nn.Module, owner: str, forward: Callable[..., Any]) -> None:
        self.part, self.owner = part, owner
        self.known = getattr(forward, "__globals__", {})

    def follow(self, body: list[ast.stmt], names: dict[str, str]) -> dict[str, str]:
        """The names that hold the input or its dtype behind these statements.

        Raises:
            _ElsewhereError: the input is used outside products.
        """
        for statement in body:
            if isinstance(statement, ast.Assign):
                held, targets = self._held(statement.value, names), statement.targets
                stores = {each for target in targets for each in ast.walk(target)}
                stored = {
                    each.id
                    for each in stores
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
                }
                if held is not None and not all(isinstance(each, ast.Name) for each in targets):
                    raise _ElsewhereError
                self._unheld(targets, names)
                names = {name: kind for name, kind in names.items() if name not in stored}
                names |= dict.fromkeys(stored, held) if held is not None else {}
                continue
            changed = getattr(statement, "target", None)  # of +=, which reads it too
            if isinstance(changed, ast.Name) and changed.id in names:
                raise _ElsewhereError
            children = ast.iter_child_nodes(statement)
            self._unheld([each for each in children if not isinstance(each, ast.stmt)], names)
            before: dict[str, str] = {}
            while before != names:  # a loop's next turn has the names of this one
                before = names
                for inner in ("body", "orelse", "finalbody"):
                    names = names | self.follow(getattr(statement, inner, []), dict(names))
        return names

    def _unheld(self, nodes: Iterable[ast.AST], names: dict[str, str]) -> None:
        if any(self._held(each, names) is not None for each in nodes):
            raise _ElsewhereError

    def _held(self, node: ast.AST, names: dict[str, str]) -> str | None:
        """Whether an expression is the input or its dtype; None for one that has neither in it."""
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                return names.get(name)
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                return None
            case ast.Attribute(value=value, attr=attr) if self._held(value, names) == _ROWS:
                if attr in _OF_SHAPE or attr == "dtype":
                    return _DTYPE if attr == "dtype" else None
                raise _ElsewhereError
            case ast.Call(func=ast.Attribute(value=ast.Name(id=self.owner), attr=attr)):
                child = getattr(self.part, attr, None)
                if isinstance(child, nn.Module):
                    self._follow_call(child, node, names)
                    return None
                if child is None:  # in a branch of other layers, which this one cannot run
                    return None
            case ast.Call(func=ast.Attribute(value=value, attr=attr), args=args) if (
                attr in _VIEWS and self._held(value, names) == _ROWS
            ):
                self._unheld([*args, *node.keywords], names)
                return _ROWS
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                held, x = [self._held(each, names) for each in args], torch.zeros(2, 3, 4)
                given = [x if each == _ROWS else None for each in held]
                # As the one that masks padding: without a mask it gives what it is handed.
                if _ROWS in held and tried(self.known.get(name, len), *given) is x:
                    return _ROWS
        self._unheld(ast.iter_child_nodes(node), names)
        return None

    def _follow_call(self, part: nn.Module, call: ast.Call, names: dict[str, str]) -> None:
        given = [*enumerate(call.args), *((each.arg, each.value) for each in call.keywords)]
        handed: list[int | str] = []
        for key, value in given:
            match value:
                case ast.Call(func=ast.Attribute(value=cast, attr="to"), args=[dtype]) if (
                    _is_linear(part) and self._held(dtype, names) == _DTYPE
                ):  # which the product casts in any case
                    self._unheld([cast], names)
                    continue
            held = self._held(value, names)
            if held == _DTYPE or (held and key is None):
                raise _ElsewhereError
            if held is not None and key is not None:
                handed.append(key)
        if handed and not _reads_by_products(part, handed):
            raise _ElsewhereError
