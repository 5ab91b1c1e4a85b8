"""Padding that teaches is named, at either end of a row, in rows of one sample and of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from support.foreign import Feature, packing, padded, with_tail
from support.judged import Case, statuses

from vlmpack.packing import IGNORE_INDEX
from vlmpack.proof.judge import Judgement, judge

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
