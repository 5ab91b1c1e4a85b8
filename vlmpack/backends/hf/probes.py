"""Copies of modules that are run to see what they compute, and who reads what they make."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from vlmpack.backends.linear_layers import GROUPS

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
    readers = {call[0] for call in calls if any(each is made for each in _tensors(call[1:]))}
    return bool(readers) and all(_reads_by_products(block.get_submodule(one)) for one in readers)


def _reads_by_products(part: nn.Module) -> bool:
    """Whether it is a linear layer, or attention or an MLP by the names of its first ones.

    That those read their input by products alone is tested with whole models of every family.
    """
    if type(part).forward is nn.Linear.forward and "forward" not in vars(part):
        return True
    firsts = {"qkv", *(names[0] for names in GROUPS)}
    return any(isinstance(getattr(part, name, None), nn.Linear) for name in firsts)
