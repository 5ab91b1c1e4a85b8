"""Right collators of unusual forms have no fault."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from support.foreign import Feature, packing
from support.judged import losses_of, statuses

from vlmpack.proof.judge import judge


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
