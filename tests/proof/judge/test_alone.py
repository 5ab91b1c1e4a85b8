"""Tensors are moved at any depth, and what has none of them stays the object that it is.

Samples are found in a batch wherever they lie, and lost ones are told.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import pytest
import torch

from vlmpack.proof.judge.alone import (
    CPU,
    Place,
    Sample,
    copied,
    device_of,
    find_places,
    longest_start,
    on,
)

META = torch.device("meta")


class Ends(NamedTuple):
    starts: torch.Tensor
    count: int


def test_tensors_are_moved_at_any_depth() -> None:
    own = object()
    value = {
        "ids": torch.zeros(2),
        "kept": {"ends": Ends(torch.ones(3), 3), "parts": [torch.zeros(1), (torch.zeros(1),)]},
        "own": own,
    }
    moved = on(value, META)
    assert type(moved["kept"]["ends"]) is Ends and moved["kept"]["ends"].count == 3
    tensors = [moved["ids"], moved["kept"]["ends"].starts, moved["kept"]["parts"][0]]
    tensors.append(moved["kept"]["parts"][1][0])
    assert {tensor.device for tensor in tensors} == {META}
    assert moved["own"] is own
    assert value["ids"].device == CPU


def test_what_is_there_already_stays_the_same_object() -> None:
    value = {"a": [torch.zeros(1)], "b": (1, "two")}
    assert on(value, CPU) is value


def test_a_model_without_parameters_is_on_the_cpu() -> None:
    assert device_of(torch.nn.ReLU()) == CPU
    assert device_of(torch.nn.Linear(1, 1, device="meta")) == META


def test_a_copy_shares_no_memory_but_of_what_cannot_be_copied() -> None:
    lock, labels = Lock(), torch.zeros(1)
    ends = Ends(torch.zeros(1), 1)
    value = [{"lock": lock, "labels": labels, "ends": ends}]
    [other] = copied(value)
    assert other["lock"] is lock and type(other["ends"]) is Ends
    other["labels"][0] = other["ends"].starts[0] = 1
    assert labels.item() == 0 and ends.starts.item() == 0


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
