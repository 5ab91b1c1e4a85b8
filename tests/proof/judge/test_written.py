"""A collator that writes into its samples is told so, and is blamed for nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.foreign import Feature, packing
from support.judged import Case, losses_of

from vlmpack.packing import IGNORE_INDEX
from vlmpack.proof.judge import judge
from vlmpack.proof.judge.alone import alone_of, copied

Write = Callable[[Feature, int], None]
"""A sample and its place in the batch, written into."""


def first_label(one: Feature, place: int) -> None:
    one["labels"][0] = IGNORE_INDEX


def own_first_label(one: Feature, place: int) -> None:
    """What a batch leaves out is another thing in each order."""
    taught = (one["labels"] != IGNORE_INDEX).nonzero()[:, 0]
    if place == 0 and len(taught) > 1:
        one["labels"][int(taught[-1])] = IGNORE_INDEX


def shifted(one: Feature, place: int) -> None:
    one["labels"][:] = one["labels"].roll(-1)


def darkened(one: Feature, place: int) -> None:
    if "pixel_values" in one:
        one["pixel_values"] *= 0.5


def popped(one: Feature, place: int) -> None:
    one.pop("labels")


def writing(case: Case, write: Write, seen: list[int] | None = None) -> Any:
    """The right collator, which writes into its samples when its batch is made."""
    right = packing(case.model())

    def collate(samples: Sequence[Feature]) -> Feature:
        batch = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in right(samples).items()
        }
        for place, one in enumerate(samples):
            write(one, place)
        if seen is not None:
            seen.append(len(samples))
        return batch

    return collate


def said(found: Any) -> str:
    [row] = [one.check.detail for one in found.findings if one.check.name == "samples"]
    return str(row)


@pytest.mark.cases(quick=("shifted", "popped"), slow=("darkened", "own_first_label"))
@pytest.mark.parametrize(
    ("write", "what"),
    [
        pytest.param(shifted, "(labels of sample 0)", id="shifted"),
        pytest.param(own_first_label, "(labels of sample 0)", id="own_first_label"),
        pytest.param(darkened, "(pixel_values of sample ", id="darkened"),
        pytest.param(popped, "(sample 0, which raised VlmpackError", id="popped"),
    ],
)
def test_another_second_batch_is_named(cases: Any, write: Write, what: str) -> None:
    """As in the second epoch over a dataset in memory; the samples that are given stay."""
    case = cases("qwen2_5_vl")
    samples = copied(case.samples)
    found = judge(case.model(), writing(case, write), samples)
    assert found.faults == ("samples written",), str(found)
    assert what in said(found), said(found)
    for one, before in zip(samples, case.samples, strict=True):
        assert one.keys() == before.keys()
        assert all(torch.equal(one[name], before[name]) for name in before)


def test_a_second_batch_that_is_the_same_passes(cases: Any) -> None:
    """The first label of each sample masked where it lies, which nothing predicts."""
    case = cases("llama")
    samples = copied(case.samples)
    for one in samples:
        one["labels"][0] = one["input_ids"][0]
    found = judge(case.model(), writing(case, first_label), samples)
    assert found.passed, str(found)
    assert said(found).endswith("(labels of sample 0); a second batch of them is the same")


def test_nothing_is_said_of_a_collator_that_does_not_write(cases: Any) -> None:
    seen: list[int] = []
    found = judge(
        cases("llama").model(),
        writing(cases("llama"), lambda *_: None, seen),
        cases("llama").samples,
    )
    assert found.passed and seen
    assert "samples" not in {one.check.name for one in found.findings}


def test_samples_that_are_numbers_in_a_dataset_are_looked_at(cases: Any) -> None:
    """A copy of a number protects nothing: what is compared is what `alone=` reads."""
    case = cases("llama")
    dataset = copied(case.samples)
    collate = writing(case, shifted)
    found = judge(
        case.model(),
        lambda numbers: collate([dataset[n] for n in numbers]),
        list(range(len(dataset))),
        alone=lambda n: alone_of(dataset[n]),
        change=lambda n: n,
    )
    assert found.faults == ("samples written",), str(found)


def test_arrays_are_copied_as_tensors_are(cases: Any) -> None:
    """`torch.as_tensor` of an array shares its memory."""
    case = cases("llama")
    right = writing(case, lambda *_: None)
    arrays = [{name: value.numpy() for name, value in one.items()} for one in copied(case.samples)]

    def collate(samples: Any) -> Feature:
        batch = right([{n: torch.tensor(v) for n, v in one.items()} for one in samples])
        for one in samples:
            one["labels"][:] = np.roll(one["labels"], -1)
        return batch

    def change(one: Any) -> Any:
        ids = one["input_ids"].copy()
        ids[1:] = ids[1:][::-1]
        return {**one, "input_ids": ids}

    found = judge(case.model(), collate, arrays, change=change)
    assert found.faults == ("samples written",), str(found)


def test_others_that_write_reach_nobody(cases: Any) -> None:
    """`losses=` that takes labels out of its batch, `alone=` and `change=` out of their sample."""
    case = cases("llama")

    def losses(model: Any, batch: Any) -> torch.Tensor:
        found = losses_of(model, batch)
        batch.pop("labels").zero_()
        return found

    def alone(sample: Feature) -> Feature:
        made = alone_of(sample)
        sample.clear()
        return made

    def change(sample: Feature) -> Feature:
        sample["input_ids"][1:] = sample["input_ids"][1:].flip(0)
        return sample

    kept = copied(case.samples)
    found = case.judge(losses=losses, alone=alone, change=change)
    assert found.passed, str(found)
    for one, before in zip(case.samples, kept, strict=True):
        assert one.keys() == before.keys()
        assert all(torch.equal(one[name], before[name]) for name in before)
