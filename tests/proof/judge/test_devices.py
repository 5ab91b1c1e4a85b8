"""Tensors are moved at any depth, and what has none of them stays the object that it is."""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

import torch

from vlmpack.proof.judge.alone import CPU, copied, device_of, on

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
