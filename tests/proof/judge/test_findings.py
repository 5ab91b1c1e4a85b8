"""What a batch says is named by the fault that it is, in whatever order its samples stand.

Padding that teaches is named, at either end of a row, in rows of one sample and of several.

Pixels that are another sample's move that one: a swap is named, and a leak only beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.foreign import Feature, broken, packing, padded, with_tail
from support.judged import Case, statuses

from vlmpack.packing import IGNORE_INDEX
from vlmpack.proof.judge import Judgement, judge
from vlmpack.proof.judge.alone import Place, Sample
from vlmpack.proof.judge.findings import check_positions

NAME = "labels on padding"


def left_padded(samples: Any) -> Feature:
    """The same rows as `padded` makes, with their padding in front."""
    batch = padded(samples)
    for row, sample in enumerate(samples):
        by = batch["input_ids"].shape[1] - len(sample["input_ids"])
        for name in ("input_ids", "labels", "attention_mask"):
            batch[name][row] = batch[name][row].roll(by)
    return batch


def shifted(batch: Feature) -> Feature:
    return {**batch, "labels": F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)}


def judged(case: Case, form: str, labels: Any, touch: Callable[[Feature], object]) -> Judgement:
    model = case.model(packed=form == "packed")
    pack = packing(model)
    forms: dict[str, Callable[[Any], Feature]] = {
        "left": left_padded,
        "right": padded,
        "packed": lambda samples: with_tail(pack(samples)),
    }
    right = forms[form]

    def collate(samples: Any) -> Feature:
        batch = right(samples) if labels == "unshifted" else shifted(right(samples))
        batch["labels"] = batch["labels"].clone()
        touch(batch)
        return batch

    return judge(model, collate, case.samples, labels=labels)


def zero(batch: Feature) -> None:
    """As a collator that pads labels with what it pads everything with."""
    if "attention_mask" in batch:
        batch["labels"][batch["attention_mask"] == 0] = 0
    else:
        batch["labels"][:, -3:] = 0


@pytest.mark.cases(quick="unshifted-packed", slow="shifted-left")
@pytest.mark.parametrize("form", ["right", "left", "packed"])
@pytest.mark.parametrize("labels", ["unshifted", "shifted"])
def test_padding_that_teaches_is_named(cases: Any, form: str, labels: Any) -> None:
    case = cases("llama")
    right = judged(case, form, labels, lambda _: None)
    assert right.passed and statuses(right)["labels of padding"] == "pass", str(right)
    found = judged(case, form, labels, zero)
    assert found.faults == (NAME,), str(found)
    said = statuses(found)
    assert said["labels"] == said["loss of each sample"] == "pass"
    assert said["gradients: language model"] == "fail"
    [row] = [one.check for one in found.findings if one.fault == NAME]
    assert "label 0" in row.detail and "-100" in row.look_at


def test_a_first_token_that_padding_predicts_is_named(cases: Any) -> None:
    def teach(batch: Feature) -> None:
        at = int(batch["attention_mask"][0].argmax())
        assert at > 0
        batch["labels"][0, at] = batch["input_ids"][0, at]

    found = judged(cases("llama"), "left", "unshifted", teach)
    assert found.faults == (NAME,) and "sample 0" in str(found), str(found)


def test_a_last_token_that_predicts_padding_is_named(cases: Any) -> None:
    def teach(batch: Feature) -> None:
        at = int(batch["attention_mask"][0].sum()) - 1
        batch["labels"][0, at] = 7

    found = judged(cases("llama"), "right", "shifted", teach)
    assert found.faults == (NAME,) and "sample 0" in str(found), str(found)


def test_a_shift_that_reaches_padding_is_a_shift(cases: Any) -> None:
    def late(batch: Feature) -> None:
        batch["labels"] = F.pad(batch["labels"], (1, 0), value=IGNORE_INDEX)[:, :-1]

    assert judged(cases("llama"), "right", "unshifted", late).faults[0] == "label shift"


FAMILIES = ["qwen2_5_vl", pytest.param("internvl", marks=pytest.mark.slow)]


def said_of(found: Any, name: str) -> str:
    [row] = [one.check for one in found.findings if one.check.name == name]
    return str(row.detail)


@pytest.mark.parametrize("family", FAMILIES)
def test_swapped_pixels_are_no_leak(cases: Any, family: str) -> None:
    found = cases(family).judge("pixels swapped")
    assert found.faults == ("pixels swapped",), str(found)
    assert "ids alone were changed" in said_of(found, "isolation")
    assert "ids alone" not in said_of(cases(family).judge(), "isolation")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_leak_beside_swapped_pixels_is_one(cases: Any, family: str) -> None:
    case = cases(family)
    collate = broken(packing(case.model()), "isolation")
    found = case.judge("pixels swapped", collate=collate)
    assert found.faults == ("pixels swapped", "isolation"), str(found)


@pytest.mark.slow
def test_where_the_change_is_somebodys_the_row_says_what_may_explain_it(cases: Any) -> None:
    def change(sample: Any) -> Any:
        pixels = {n: v.flip(0) for n, v in sample.items() if n == "pixel_values"}
        return {**sample, **pixels}

    case = cases("qwen2_5_vl")
    found = case.judge("pixels swapped", change=change)
    assert found.faults == ("pixels swapped", "isolation"), str(found)
    assert "may come from the pixels of the rows above" in said_of(found, "isolation")
    right = case.judge(change=change)
    assert right.passed and statuses(right)["isolation"] == "shown", str(right)
    assert "pixels" not in said_of(right, "isolation")


RUN_ON, ONE_AXIS = "positions over the row", "one-axis positions"


def details(found: Judgement) -> dict[str, str]:
    """Fault -> what the row says of it."""
    return {one.fault: one.check.detail for one in found.findings if one.fault}


def counted(case: Case, positions: Any, samples: list[Feature]) -> Judgement:
    """One row, whose positions (A, 1, S) are made of those that are right."""
    right = packing(case.model())

    def collate(ones: Any) -> Feature:
        batch = right(ones)
        return {**batch, "position_ids": positions(batch["position_ids"])}

    return case.judge(collate=collate, samples=samples)


def over_the_row(right: torch.Tensor) -> torch.Tensor:
    return torch.arange(right.shape[-1]).expand_as(right)


@pytest.mark.cases(quick="1-as they are", slow="*")
@pytest.mark.parametrize("order", [1, -1], ids=["as they are", "reversed"])
@pytest.mark.parametrize("axes", [1, 3, 4])
def test_axes_that_count_over_the_row_have_both_faults(cases: Any, order: int, axes: int) -> None:
    """As transformers counts where a batch has none, on as many axes as it has."""
    case = cases("qwen2_5_vl")
    samples = case.samples[::order]

    def positions(right: torch.Tensor) -> torch.Tensor:
        found = over_the_row(right)[:axes]
        return found[0] if axes == 1 else found

    found = counted(case, positions, samples)
    assert sorted(found.faults) == [ONE_AXIS, RUN_ON], str(found)
    assert "run on from the samples before it" in details(found)[RUN_ON]
    told = details(found)[ONE_AXIS].split()
    assert told[2:4] == ["has", "images:"] and "pixel_values" in samples[int(told[1])]


@pytest.mark.parametrize("order", [1, -1], ids=["as they are", "reversed"])
def test_axes_that_count_as_text_at_each_sample_have_one_fault(cases: Any, order: int) -> None:
    case = cases("qwen2_5_vl")
    found = counted(case, lambda right: right[:1].expand_as(right), case.samples[::order])
    assert found.faults == (ONE_AXIS,), str(found)


PICTURE = torch.tensor(
    [[0, 1, 2, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 3, 4, 5], [0, 1, 2, 3, 2, 3, 4, 5]]
)
"""(3, 8) positions of a sample with an image of 2 x 2 tokens: 6 of them."""
TEXT = torch.arange(5).expand(3, -1)
GAP = 3
"""Slots between two samples, as an alignment leaves them."""


@pytest.mark.parametrize(
    ("shifts", "fault"),
    [
        pytest.param((0, 8, 13), RUN_ON, id="tokens"),
        pytest.param((0, 6, 11), RUN_ON, id="positions, as the class counts a whole row"),
        pytest.param((0, 8 + GAP, 13 + 2 * GAP), RUN_ON, id="slots"),
        pytest.param((0, 5, 10), "other positions", id="one less"),
        pytest.param((1, 1, 1), "other positions", id="from 1 on"),
        pytest.param((0, 7, 7), "other positions", id="any"),
        pytest.param((0, -8, -13), "other positions", id="backwards"),
    ],
)
def test_positions_run_on_where_they_are_shifted_by_the_length_before(
    shifts: tuple[int, ...], fault: str
) -> None:
    samples, where, parts, start = [], [], [], 0
    for own, shift in zip((PICTURE, TEXT, TEXT), shifts, strict=True):
        ids = torch.arange(own.shape[1])
        samples.append(Sample(ids, ids.clone(), torch.zeros(own.shape[1] - 1), own, {}))
        where.append(Place(0, start, start + len(ids)))
        parts += [own + shift, torch.zeros(3, GAP, dtype=torch.int64)]
        start += len(ids) + GAP
    [found] = check_positions(
        torch.cat(parts, 1)[:, None], samples, where, packed=True, opaque=False
    )
    assert found.fault == fault, found
    assert ("run on from the samples before it" in found.check.detail) == (fault == RUN_ON)


def test_positions_that_count_padding_are_told_so(cases: Any) -> None:
    """Rows of one sample each, padded at the left: nothing is before it but padding."""
    case = cases("llama")
    width = max(len(one["input_ids"]) for one in case.samples)

    def collate(samples: Any) -> Feature:
        def left(name: str, fill: int) -> torch.Tensor:
            made = [
                torch.nn.functional.pad(one[name], (width - len(one[name]), 0), value=fill)
                for one in samples
            ]
            return torch.stack(made)

        mask = torch.stack(
            [(torch.arange(width) >= width - len(one["input_ids"])).long() for one in samples]
        )
        rows = {"input_ids": left("input_ids", 0), "labels": left("labels", IGNORE_INDEX)}
        return {
            **rows,
            "attention_mask": mask,
            "position_ids": torch.arange(width).expand(len(samples), -1),
        }

    found = judge(case.model(packed=False), collate, case.samples)
    assert found.faults == (RUN_ON,), str(found)
    assert "they count the padding before it" in details(found)[RUN_ON]


def test_pixels_that_are_missing_are_named(cases: Any) -> None:
    """Where the model computes the batch, nothing else can have them."""
    case = cases("qwen2_5_vl")

    def without(samples: Any) -> Feature:
        batch = padded(samples)
        del batch["pixel_values"]
        return batch

    found = judge(case.model(packed=False), without, case.samples)
    assert found.faults == ("other pixels",), str(found)
    count = sum("pixel_values" in one for one in case.samples)
    assert details(found)["other pixels"] == f"the batch has none, and {count} samples have it"
    assert statuses(found)["image_grid_thw"] == "pass"


def masked(samples: Any, which: list[int]) -> Feature:
    batch = padded(samples)
    batch["labels"][which] = IGNORE_INDEX
    return batch


def test_a_sample_whose_labels_are_all_masked_is_named(cases: Any) -> None:
    case = cases("llama")
    wanted = int((case.samples[1]["labels"][1:] != IGNORE_INDEX).sum())
    found = judge(case.model(packed=False), lambda ones: masked(ones, [1]), case.samples)
    assert found.faults == ("other labels",), str(found)
    assert f"sample 1 has no label left, alone {wanted}" in str(found)
    assert f"sample 1 has 0 label tokens in the batch and {wanted} alone" in str(found)
    assert " inf" not in str(found)


def test_a_batch_that_teaches_nothing_shows_no_gradients(cases: Any) -> None:
    case = cases("llama")
    every = list(range(len(case.samples)))
    found = judge(case.model(packed=False), lambda ones: masked(ones, every), case.samples)
    assert found.faults == ("other labels",), str(found)
    assert statuses(found)["gradients"] == "not shown"
    assert "there is no loss of a label token" in str(found) and " inf" not in str(found)


def test_what_is_left_of_a_sample_that_was_cut_is_said(cases: Any) -> None:
    case = cases("llama")
    width = max(len(one["input_ids"]) for one in case.samples) - 5
    [cut, *_] = [n for n, one in enumerate(case.samples) if len(one["input_ids"]) > width]
    length = len(case.samples[cut]["input_ids"])

    def collate(samples: Any) -> Feature:
        return {name: value[:, :width] for name, value in padded(samples).items()}

    found = judge(case.model(packed=False), collate, case.samples)
    wanted = f"sample {cut}: of its {length} tokens the batch has the first {width}"
    assert details(found) == {"tokens lost": wanted}
