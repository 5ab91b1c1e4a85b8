"""A model whose own attention was patched is compared with another one, of the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.foreign import feature, packing, varlen
from support.judged import Case
from support.videos import Shot, Told

import vlmpack
from vlmpack.errors import VlmpackError
from vlmpack.proof.judge import judge
from vlmpack.proof.judge.alone import alone_of

PATCHED = "of_a_trainer"


def patched(case: Case, attention: Any) -> Any:
    """The stock class with a trainer's attention in the language model."""
    from transformers import AttentionInterface

    AttentionInterface.register(PATCHED, attention)
    model = case.model()
    model.get_submodule(case.encoder.family.modules.language).set_attn_implementation(PATCHED)
    return model


def rows_alone(module: Any, *args: Any, **options: Any) -> Any:
    """As kernels that take packed rows alone."""
    if options.get("cu_seq_lens_q") is None:
        raise ValueError("cu_seq_lens_q is missing")
    return varlen(module, *args, **options)


def hotter(module: Any, *args: Any, **options: Any) -> Any:
    """Scaled wrongly, of a sample alone, too."""
    return varlen(module, *args, **{**options, "scaling": options["scaling"] * 2})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llama"])
def test_attention_that_takes_rows_alone_is_judged(cases: Any, family: str) -> None:
    case = cases(family)
    model, stock = patched(case, rows_alone), case.model(packed=False)
    with pytest.raises(ValueError, match="cu_seq_lens_q is missing"):
        judge(model, packing(stock), case.samples)
    found = judge(model, packing(stock), case.samples, stock=stock)
    assert found.passed, str(found)
    assert any(one.check.name == "gradients: language model" for one in found.findings)


def test_attention_that_is_wrong_alone_too_is_seen_by_the_stock_one(cases: Any) -> None:
    case = cases("llama")
    model, stock = patched(case, hotter), case.model(packed=False)
    assert judge(model, packing(model), case.samples).passed  # it is compared with itself
    found = judge(model, packing(model), case.samples, stock=stock)
    assert found.faults == ("other loss", "other gradients"), str(found)


def test_gradients_from_before_are_dropped(cases: Any) -> None:
    """Of both models, since a trainer's may come from a step."""
    case = cases("llama")
    model, stock = case.model(), case.model(packed=False)
    for each in (model, stock):
        for parameter in each.parameters():
            parameter.grad = torch.ones_like(parameter)
    found = judge(model, packing(model), case.samples, stock=stock)
    assert found.passed, str(found)
    assert all(each.grad is None for each in (*model.parameters(), *stock.parameters()))


def test_what_is_frozen_in_either_is_left_out(cases: Any) -> None:
    case = cases("llama")
    model, stock = case.model(), case.model(packed=False)
    model.get_input_embeddings().requires_grad_(False)
    stock.model.layers[0].requires_grad_(False)
    found = judge(model, packing(model), case.samples, stock=stock)
    assert found.passed, str(found)
    count = sum(
        a.requires_grad and b.requires_grad
        for a, b in zip(model.parameters(), stock.parameters(), strict=True)
    )
    said = [one.check.detail for one in found.findings if "gradients" in one.check.name]
    assert sum(int(each.split()[0]) for each in said) == count < 21


def test_a_reference_of_other_weights_is_none(cases: Any) -> None:
    case = cases("llama")
    model, other = case.model(), case.model(packed=False)
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1e-3
    with pytest.raises(vlmpack.VlmpackError, match=r"other weights than model: lm_head\.weight"):
        judge(model, packing(model), case.samples, stock=other)
    vision = cases("qwen2_5_vl").model(packed=False)
    with pytest.raises(vlmpack.VlmpackError, match="other parameters than model: "):
        judge(model, packing(model), case.samples, stock=vision)


def test_what_positions_are_counted_by_is_asked_of_the_samples(cases: Any) -> None:
    case = cases("qwen2_5_vl")
    text = [
        {name: sample[name] for name in ("input_ids", "labels")}
        for sample in case.samples
        if "pixel_values" not in sample
    ]
    with pytest.raises(VlmpackError, match=r"by .*mm_token_type_ids too.* has .*input_ids"):
        judge(case.model(), packing(case.model()), [*text, *text])


@pytest.mark.slow
def test_text_behind_a_video_is_told_by_name(cases: Any) -> None:
    """Rows as the class of transformers 5 counts pass, and it is said what that is; rows of the
    paper's positions, which vlmpack's are, differ from the class, and pass where samples say so."""
    case = cases("qwen2_5_vl")
    told = [
        Told("a", (Shot((112, 112), 16, fps=1.0), "What happens?"), "abc"),
        Told("b", ("No picture.",), "abcd"),
    ]
    encoded = [case.encoder.encode(one.cooked()) for one in told]
    samples = [feature(case.encoder, one) for one in encoded]
    model = case.model()
    as_counted = judge(model, packing(model), samples)
    [said] = [one.check for one in as_counted.findings if one.check.name == "positions"]
    assert as_counted.passed, str(as_counted)
    assert "inside the video's time, as transformers 5" in said.detail

    def behind(given: Any) -> Any:
        ours = [encoded[len(one["input_ids"]) == encoded[1].length].position_ids for one in given]
        text = torch.cat([torch.arange(each.shape[1]) for each in ours])
        positions = torch.cat([text[None], torch.cat(ours, 1)])[:, None]
        return {**packing(model)(given), "position_ids": positions}

    as_trained = judge(model, behind, samples)
    [said] = [one.check for one in as_trained.findings if one.check.name == "positions"]
    assert said.fails and "its text is behind the video" in said.detail
    assert "alone=" in said.look_at

    def alone(one: Any) -> Any:
        own = encoded[len(one["input_ids"]) == encoded[1].length].position_ids
        return alone_of(one) | {"position_ids": own[:, None]}

    found = judge(model, behind, samples, alone=alone)
    assert found.passed, str(found)
