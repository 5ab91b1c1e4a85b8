"""The search for leaks: what it runs, and that it compares like with like."""

from __future__ import annotations

from typing import Any

import torch
from support.foreign import Feature, packing
from support.judged import losses_of


def test_each_batch_is_made_and_computed_once(cases: Any) -> None:
    case = cases("llama")
    right = packing(case.model())
    made: list[Feature] = []
    computed: list[Any] = []

    def collate(samples: Any) -> Feature:
        made.append(right(samples))
        return made[-1]

    def losses(model: Any, batch: Any) -> torch.Tensor:
        computed.append(batch["input_ids"])
        return losses_of(model, batch)

    assert case.judge(collate=collate, losses=losses).passed
    assert len(made) == len(computed) == 1 + len(case.samples)
    assert len({tuple(ids.flatten().tolist()) for ids in computed}) == len(computed)


def test_a_kernel_that_differs_without_a_graph_leaks_nothing(cases: Any) -> None:
    """Those of a GPU do, in the last bit, and more in half of the bits."""

    def losses(model: Any, batch: Any) -> torch.Tensor:
        found = losses_of(model, batch)
        return found if torch.is_grad_enabled() else found + 1e-3

    found = cases("llama").judge(losses=losses)
    assert found.passed, str(found)


def test_a_collator_of_lists_gets_lists(cases: Any) -> None:
    """As transformers' tokenizers return them; the changed samples too."""
    case = cases("llama")
    right = packing(case.model())
    lists = [
        {**one, "input_ids": one["input_ids"].tolist(), "labels": one["labels"].tolist()}
        for one in case.samples
    ]

    def collate(samples: Any) -> Feature:
        given = [[*one["input_ids"], *one["labels"]] for one in samples]
        assert all(type(number) is int for one in given for number in one)
        tensors = [
            {**one, **{name: torch.tensor(one[name]) for name in ("input_ids", "labels")}}
            for one in samples
        ]
        return right(tensors)

    assert case.judge(samples=lists, collate=collate).passed


def test_leaks_are_counted_by_pairs(cases: Any) -> None:
    """Of one row of three samples each moves those behind it."""
    case = cases("llama")
    said = {}
    for count in (2, 3):
        found = case.judge("isolation", samples=case.samples[:count])
        [row] = [one.check for one in found.findings if one.fault == "isolation"]
        said[count] = row.detail
    assert said[2] == "sample 0 moves sample 1"
    assert said[3] == "sample 0 moves sample 1, the first of 3 such pairs"
