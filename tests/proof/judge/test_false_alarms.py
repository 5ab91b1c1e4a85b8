"""Right collators of unusual forms have no fault."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.foreign import Feature, packing, padded
from support.judged import losses_of, statuses

from vlmpack.proof.judge import judge


@pytest.mark.slow
def test_positions_that_losses_counts_are_none_of_the_batch(cases: Any) -> None:
    case = cases("qwen2_5_vl")
    model = case.model()
    right = packing(model)
    counted: dict[int, torch.Tensor] = {}

    def collate(samples: Any) -> Feature:
        batch = right(samples)
        counted[batch["input_ids"].shape[1]] = batch.pop("position_ids")
        return batch

    def losses(model: Any, batch: Any, one_axis: bool = False) -> torch.Tensor:
        positions = counted[batch["input_ids"].shape[1]]
        positions = positions[0] if one_axis else positions
        return losses_of(model, {**batch, "position_ids": positions})

    found = judge(model, collate, case.samples, losses=losses)
    assert found.passed and statuses(found)["positions"] == "not shown", str(found)
    found = judge(model, collate, case.samples, losses=partial(losses, one_axis=True))
    assert found.faults[0] == "other loss" and "losses= has to count" in str(found), str(found)
    found = judge(model, collate, case.samples)
    assert found.faults[0] == "positions over the row", str(found)


def test_a_sample_that_begins_with_another_is_found_in_any_order(cases: Any) -> None:
    """A row sorted by length, as packers that fill the largest first make it."""
    case = cases("llama")
    longest = max(case.samples, key=lambda one: len(one["input_ids"]))
    start = {name: value[: len(value) // 2] for name, value in longest.items()}
    right = packing(case.model())

    def collate(samples: Any) -> Feature:
        return right(sorted(samples, key=lambda one: -len(one["input_ids"])))

    found = judge(case.model(), collate, [start, *case.samples])
    assert found.passed, str(found)


def drawn(samples: list[Feature], draw: random.Random) -> list[Feature]:
    return draw.sample(samples, len(samples))


ORDERS: dict[str, Callable[[list[Feature], random.Random], list[Feature]]] = {
    "reversed": lambda samples, _: samples[::-1],
    "drawn anew": drawn,
}


@pytest.mark.cases(slow="packed-reversed-qwen2_5_vl")
@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("internvl", marks=pytest.mark.slow)])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_twins_are_told_apart_by_their_images(
    cases: Any, family: str, order: str, form: str
) -> None:
    """The same question of two images: what the ids are says not which of the two it is."""
    case = cases(family)
    twins = []
    for one in case.samples[:4]:
        twins.append(one)
        if "pixel_values" in one:
            twins.append({**one, "pixel_values": one["pixel_values"].flip(0) * 0.5})
    assert len(twins) > 5
    model = case.model(packed=form == "packed")
    right = packing(model) if form == "packed" else padded
    draw = random.Random(0)
    found = judge(model, lambda samples: right(ORDERS[order](samples, draw)), twins)
    assert found.passed and statuses(found)["pixel_values"] == "pass", str(found)


@pytest.mark.cases(slow="reversed")
@pytest.mark.parametrize("order", ORDERS)
def test_twins_are_told_apart_by_what_they_teach(cases: Any, order: str) -> None:
    case = cases("llama")
    twins = []
    for one in case.samples:
        silent = one["labels"].clone()
        silent[(silent != -100).nonzero()[0, 0]] = -100
        twins += [{**one, "labels": silent}, one, one]
    right, draw = packing(case.model()), random.Random(0)
    found = case.judge(samples=twins, collate=lambda samples: right(ORDERS[order](samples, draw)))
    assert found.passed, str(found)


def test_twins_whose_images_are_swapped_are_not_told_apart(cases: Any) -> None:
    """Only their labels say which is which, and those say that the pixels are the other's."""
    case = cases("qwen2_5_vl")
    [one] = [s for s in case.samples if len(s.get("image_grid_thw", ())) == 1][:1]
    silent = one["labels"].clone()
    silent[(silent != -100).nonzero()[0, 0]] = -100
    other = {**one, "pixel_values": one["pixel_values"].flip(0) * 0.5, "labels": silent}
    found = case.judge("pixels swapped", samples=[one, other])
    assert "pixels swapped" in found.faults, str(found)
