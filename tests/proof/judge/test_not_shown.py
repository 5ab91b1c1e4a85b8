"""What could not be compared is said, and is no pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.foreign import Feature, by_token, packing, padded
from support.judged import losses_of, statuses

from vlmpack.packing import IGNORE_INDEX
from vlmpack.proof.judge import judge


@pytest.mark.slow
def test_losses_of_another_number_show_no_isolation(cases: Any) -> None:
    case = cases("llama")
    assert case.judge(losses=losses_of).passed
    for fault in ("", "isolation"):
        found = case.judge(fault, losses=lambda m, b: losses_of(m, b)[:-1])
        assert statuses(found)["isolation"] == "not shown", str(found)
        assert found.faults[:1] == ("other loss",)
        tokens = found.label_tokens
        assert str(found).count(f"{tokens - 1} losses, and {tokens} label tokens") == 2, str(found)


def test_one_sample_that_learns_shows_no_isolation(cases: Any) -> None:
    """The others have no loss that could move."""
    case = cases("llama")
    first, *others = case.samples
    silent = [{**one, "labels": torch.full_like(one["labels"], IGNORE_INDEX)} for one in others]
    for fault in ("", "isolation"):
        found = case.judge(fault, samples=[first, silent[0]])
        assert statuses(found)["isolation"] == "not shown", str(found)
        assert "isolation" in str(found).splitlines()[-1], str(found)


def test_a_change_that_changes_nothing_shows_no_isolation(cases: Any) -> None:
    found = cases("llama").judge("isolation", change=dict)
    assert statuses(found)["isolation"] == "not shown", str(found)


def test_losses_without_a_graph_show_no_gradients(cases: Any) -> None:
    found = cases("llama").judge(losses=lambda m, b: losses_of(m, b).detach())
    assert statuses(found)["gradients"] == "not shown"
    assert str(found).splitlines()[-1] == "right; not judged: gradients, average", str(found)


def test_positions_that_the_batch_has_not_are_not_shown(cases: Any) -> None:
    """Of rows of one sample each: the model counts them."""
    case = cases("llama")
    found = judge(case.model(packed=False), padded, case.samples)
    assert found.passed and statuses(found)["positions"] == "not shown", str(found)
    assert "losses and gradients say whether they are right" in str(found)
    assert str(found).splitlines()[-1] == "right; not judged: positions", str(found)


@pytest.mark.slow
def test_pixels_that_the_batch_has_not_are_not_shown(cases: Any) -> None:
    case = cases("qwen2_5_vl")
    right = packing(case.model())
    kept: list[Any] = []

    def collate(samples: Any) -> Feature:
        batch = right(samples)
        kept.append(batch.pop("pixel_values"))
        return batch

    def losses(model: Any, batch: Any) -> torch.Tensor:
        return losses_of(model, {**batch, "pixel_values": kept[-1]})

    found = case.judge(collate=collate, losses=losses)
    assert found.passed and statuses(found)["pixel_values"] == "not shown", str(found)
    assert statuses(found)["image_grid_thw"] == "pass"


def said_of_average(found: Any) -> str:
    [row] = [one.check for one in found.findings if one.check.name == "average"]
    assert row.status == "not shown" and "step=" in row.detail, str(found)
    assert "average" in str(found).splitlines()[-1]
    return str(row.detail)


def test_an_average_that_nobody_shows_is_not_shown(cases: Any) -> None:
    case = cases("llama")
    found = case.judge(losses=losses_of)
    assert found.passed and "losses= computes the batch" in said_of_average(found)
    assert statuses(case.judge(losses=losses_of, step=by_token))["average"] == "pass"
    model = case.model()
    found = judge(model, packing(model), case.samples, labels="shifted")
    assert "shifted already" in said_of_average(found)


class Silent(torch.nn.Module):
    """A model that returns no loss, or takes no labels."""

    def __init__(self, model: Any, refusal: str = "") -> None:
        super().__init__()
        self.model, self.config, self.refusal = model, model.config, refusal

    def forward(self, labels: Any = None, **arguments: Any) -> Any:
        if labels is not None and self.refusal:
            raise TypeError(self.refusal)
        return self.model(**arguments)


@pytest.mark.slow
def test_why_a_model_shows_no_average_is_said(cases: Any) -> None:
    case = cases("llama")
    for refusal, said in (("", "returns no loss"), ("no\nlabels", "raised TypeError: no labels")):
        model = Silent(case.model(), refusal)
        found = judge(model, packing(model), case.samples)
        assert found.passed and said in said_of_average(found), str(found)
        found = judge(model, packing(model), case.samples, step=by_token)
        assert statuses(found)["average"] == "pass", str(found)


def test_models_that_train_nothing_together_show_no_gradients(cases: Any) -> None:
    case = cases("llama")
    model, stock = case.model(), case.model(packed=False)
    stock.requires_grad_(False)
    for name, one in model.named_parameters():
        one.requires_grad_("layers.0" in name)
        stock.get_parameter(name).requires_grad_("layers.0" not in name)
    found = judge(model, packing(model), case.samples, stock=stock)
    assert statuses(found)["gradients"] == "not shown"
    assert str(found).splitlines()[-1] == "right; not judged: gradients", str(found)
