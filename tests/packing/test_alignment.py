"""The multiples of a packed row, as the design counts them."""

from __future__ import annotations

from math import lcm

import pytest

from vlmpack.packing import Alignment, alignment, round_up


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({}, Alignment(1, 1)),
        ({"context_parallel": 1, "tensor_parallel": 8}, Alignment(1, 1)),
        ({"context_parallel": 2}, Alignment(4, 4)),
        ({"context_parallel": 4}, Alignment(8, 8)),
        ({"tensor_parallel": 4, "sequence_parallel": True}, Alignment(1, 4)),
        (
            {"context_parallel": 2, "tensor_parallel": 3, "sequence_parallel": True},
            Alignment(4, 12),
        ),
        ({"fp8": "fp8"}, Alignment(1, 16)),
        ({"fp8": "mxfp8"}, Alignment(1, 32)),
        ({"context_parallel": 2, "fp8": "fp8"}, Alignment(4, 32)),
        ({"context_parallel": 2, "fp8": "mxfp8"}, Alignment(4, 64)),
        (
            {"context_parallel": 3, "tensor_parallel": 5, "sequence_parallel": True, "fp8": "fp8"},
            Alignment(6, 240),
        ),
    ],
    ids=str,
)
def test_multiples_of_the_design(layout, expected):
    assert alignment(**layout) == expected


@pytest.mark.parametrize("context_parallel", range(1, 9))
@pytest.mark.parametrize("tensor_parallel", range(1, 9))
def test_only_twice_cp_is_paid_by_every_sequence(context_parallel, tensor_parallel):
    found = alignment(
        context_parallel=context_parallel, tensor_parallel=tensor_parallel, sequence_parallel=True
    )
    cp = 2 * context_parallel if context_parallel > 1 else 1
    assert found.sequence == cp
    assert found.row == lcm(cp, context_parallel * tensor_parallel)
    assert found.row % found.sequence == 0, "the tail segment is aligned too"


def test_round_up():
    assert [round_up(n, 4) for n in (0, 1, 3, 4, 5, 8)] == [0, 4, 4, 4, 8, 8]
    assert [round_up(n, 1) for n in (0, 1, 7)] == [0, 1, 7]
