"""A function of autograd says what its second derivative is: the right one, or an error.

torch differentiates a backward pass again as if its operators were all there is. Kernels, messages
between ranks and numbers that the forward pass kept as constants make that wrong without a word.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch
from support.recurrences import segments
from support.shards import ROOT

from vlmpack.recurrence.convolution import segment_convolution
from vlmpack.recurrence.rows import _Gather, _Spread

TWICE = {
    "_Evened": "a slice of its gradient",
    "_Gather": "held below",
    "_Spread": "held below",
    "_SumParts": "its gradient as it is",
    "_Taps": "held below",
    "_WithLoss": "its gradient as it is, and a constant",
}
"""Functions that may be differentiated twice -> their backward pass."""


def functions(root: Path) -> Iterator[tuple[str, bool]]:
    """Names of the classes, and whether a second derivative raises an error."""
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(
                ast.unparse, node.bases
            ):
                (backward,) = (
                    each
                    for each in node.body
                    if isinstance(each, ast.FunctionDef) and each.name == "backward"
                )
                marks = map(ast.unparse, backward.decorator_list)
                yield node.name, "once_differentiable" in marks


def test_those_with_another_backward_pass_are_marked() -> None:
    found = dict(functions(ROOT / "vlmpack"))
    assert len(found) > 12, "guard"
    assert {name for name, once in found.items() if not once} == set(TWICE)


def drawn(*shape: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)


def test_those_without_have_the_second_derivative_of_differences() -> None:
    places, row = torch.tensor([3, 0, 4]), segments((3, 2, 4))
    check = torch.autograd.gradgradcheck
    assert check(lambda x: _Spread.apply(x, places, 6).square(), drawn(3, 2))
    assert check(lambda x: _Gather.apply(x, places).square(), drawn(6, 2))
    taps = drawn(1, 3, 9), drawn(3, 4)
    assert check(lambda x, w: segment_convolution(x, w, None, row, activation="silu"), taps)
