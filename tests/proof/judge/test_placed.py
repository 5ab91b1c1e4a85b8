"""Samples are found in a batch wherever they lie, and lost ones are told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from vlmpack.proof.judge.alone import Place, Sample, find_places, longest_start


def sample(*ids: int) -> Sample:
    found = torch.tensor(ids)
    return Sample(found, found.clone(), torch.zeros(len(ids) - 1), None, {})


def where(rows: Sequence[Sequence[int]], *samples: Sequence[int]) -> list[tuple[int, int] | None]:
    found = find_places(torch.tensor(rows), [sample(*ids) for ids in samples])
    return [None if at is None else (at.row, at.start) for at in found]


def test_each_lies_where_its_tokens_are() -> None:
    assert find_places(
        torch.tensor([[0, 7, 8, 9], [7, 8, 0, 0]]), [sample(8, 9), sample(7, 8)]
    ) == [
        Place(0, 2, 4),
        Place(1, 0, 2),
    ]
    assert where([[7, 8, 9, 7, 8, 9]], [7, 8, 9], [7, 8, 9]) == [(0, 0), (0, 3)]


@pytest.mark.parametrize("turn", range(3))
def test_one_that_begins_as_another_leaves_it_its_place(turn: int) -> None:
    named = [[7, 8, 9, 5], [7, 8, 9], [7, 8]]
    wanted = [(0, 0), (0, 4), (0, 7)]
    turned = named[turn:] + named[:turn]
    assert where([[7, 8, 9, 5, 7, 8, 9, 7, 8]], *turned) == wanted[turn:] + wanted[:turn]


def test_one_that_reads_across_a_boundary_leaves_both_their_places() -> None:
    """2, 3 stand behind one another where two others meet."""
    row = [[1, 2, 3, 4, 2, 3]]
    assert where(row, [2, 3], [1, 2], [3, 4]) == [(0, 4), (0, 0), (0, 2)]


def test_lost_ones_are_told() -> None:
    assert where([[7, 8, 9, 7, 8]], [7, 8, 9], [7, 8, 9]) == [(0, 0), None]
    assert where([[1, 2, 3]], [1, 2], [2, 3], [3]) == [(0, 0), None, (0, 2)]
    assert where([[1, 2]], [1, 2, 3]) == [None]


@pytest.mark.parametrize("left", range(4))
def test_what_is_left_of_a_cut_one_is_counted(left: int) -> None:
    """Its end may lie in another sample, whose tokens are none of its own."""
    wanted = torch.tensor([7, 8, 9])
    row = torch.tensor([[8, 9, *wanted[:left].tolist(), 8, 9]])
    others = [Place(0, 0, 2), None, Place(0, 2 + left, 4 + left)]
    assert longest_start(row, wanted, others) == left
