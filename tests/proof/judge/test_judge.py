"""`vlmpack.judge` finds each fault that is planted in a collator, and none in right ones."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, get_args

import pytest
import torch
from support.foreign import by_token, half_learnt, load, mean_of, packing, padded, smoothed
from support.judged import Case, losses_of
from support.shards import ROOT

import vlmpack
from vlmpack.packing import IGNORE_INDEX
from vlmpack.proof.judge import Judgement, judge
from vlmpack.proof.judge.findings import Fault

FAMILIES = ("qwen2_5_vl", "internvl", "llama")
IMAGES_ONLY = ("pixels swapped", "other pixels")
PLANTED = (
    "isolation",
    "positions over the row",
    "one-axis positions",
    "other positions",
    "label shift",
    "double shift",
    "labels across samples",
    "labels on padding",
    "other labels",
    "pixels swapped",
    "other pixels",
    "tokens lost",
    "samples written",
    "refused",
)
"""Faults of a collator."""
COMPUTED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "mean of means": ({"step": mean_of}, ("mean of means",)),
    "other loss": ({"losses": smoothed}, ("other loss", "other gradients")),
    "other gradients": ({"losses": half_learnt}, ("other gradients",)),
}
"""Fault of a trainer -> what judge is given, and all that it says."""


@pytest.mark.cases(quick="ours-qwen2_5_vl", slow="packed-*")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["padded", "packed", "ours"])
def test_right_ones_pass(cases: Any, family: str, kind: str) -> None:
    case = cases(family)
    if kind == "padded":
        model = load(case.folder, case.encoder, packed=False)
        found = judge(model, padded, case.samples)
    elif kind == "packed":
        found = case.judge(step=by_token)
    else:
        found = judged_ours(case)
    assert found.passed, str(found)
    names = {one.check.name for one in found.findings if one.check.status == "pass"}
    assert {"labels", "isolation", "loss of each sample", "gradients: language model"} <= names
    assert found.label_tokens > 20 and found.samples == len(case.samples)


def judged_ours(case: Case) -> Judgement:
    """Our collator and model as docs/own-loop.md has them, on the stock model's weights."""
    model = load(case.folder, case.encoder, packed=False)
    twin = load(case.folder, case.encoder, packed=False)
    weights = dict(model.named_parameters(remove_duplicate=False))
    for path, module in twin.named_modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            setattr(module, name, weights[f"{path}.{name}" if path else name])
    ours = vlmpack.packed_model(twin, case.encoder, attention="segments")
    encoded = _encoded(case)
    pack = partial(vlmpack.pack_batch_sequences, pad_token_id=case.encoder.pad_token_id)

    def collate(samples: list[Any]) -> dict[str, Any]:
        batch = pack([one["encoded"] for one in samples])
        positions = batch.position_ids
        return {
            "input_ids": batch.input_ids,
            "labels": batch.labels,
            "position_ids": positions[0] if len(positions) == 1 else positions,
            "packed": batch,
        }

    def losses(own: Any, batch: Any) -> torch.Tensor:
        values, _ = vlmpack.vlm_step(iter([batch["packed"]]), ours)
        return values

    samples = [{**one, "encoded": two} for one, two in zip(case.samples, encoded, strict=True)]

    def alone(one: Any) -> Any:
        from vlmpack.proof.judge.alone import alone_of

        return alone_of({name: value for name, value in one.items() if name != "encoded"})

    def change(one: Any) -> Any:
        from vlmpack.proof.measure import ordinary_ids
        from vlmpack.proof.verify.leak import perturbed

        special = list(case.encoder.tokenizer.all_special_ids)
        ordinary = ordinary_ids([each["encoded"].input_ids for each in samples], special)
        return {**one, "encoded": perturbed(one["encoded"], ordinary)}

    return judge(
        model, collate, samples, alone=alone, labels="shifted", losses=losses, change=change
    )


def _encoded(case: Case) -> list[Any]:
    from support.shards import mixed_samples, text_samples

    made = mixed_samples() if case.has_images else text_samples()
    return [case.encoder.encode(sample.cooked()) for sample in made][: len(case.samples)]


@pytest.mark.cases(
    quick=("isolation-qwen2_5_vl", "label shift-qwen2_5_vl", "pixels swapped-qwen2_5_vl"),
    slow="*-qwen2_5_vl",
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", PLANTED)
def test_each_planted_fault_is_named(cases: Any, family: str, fault: str) -> None:
    case = cases(family)
    if fault in IMAGES_ONLY and not case.has_images:
        pytest.skip("it has no images")
    if fault == "one-axis positions" and family != "qwen2_5_vl":
        pytest.skip("it counts one axis")
    found = case.judge(fault)
    assert not found.passed and found.faults == (fault,), str(found)
    [named] = [one.check for one in found.findings if one.fault == fault]
    assert named.detail and named.look_at and fault.upper() in str(found)
    assert json.loads(json.dumps(found.to_dict()))["faults"] == list(found.faults)


@pytest.mark.cases(slow="mean of means-qwen2_5_vl")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", COMPUTED)
def test_each_fault_of_what_is_computed_is_named(cases: Any, family: str, fault: str) -> None:
    """The batch is right, and what a trainer makes of it is not."""
    options, wanted = COMPUTED[fault]
    found = cases(family).judge(**options)
    assert found.faults == wanted, str(found)
    assert fault.upper() in str(found)


def test_every_fault_is_planted() -> None:
    of_samples = "coordinates beyond the image"  # by test_coordinates
    assert {*PLANTED, *COMPUTED, of_samples} == {*get_args(Fault)} - {""}


@pytest.mark.slow
def test_shifted_labels_are_not_averaged_by_a_model_that_shifts(cases: Any) -> None:
    """Its own loss would shift them once more, which is no fault of a collator that says so."""
    case = cases("qwen2_5_vl")
    model = load(case.folder, case.encoder, packed=True)
    right = packing(model)

    def collate(samples: Any) -> Any:
        batch = right(samples)
        batch["labels"] = torch.nn.functional.pad(
            batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX
        )
        return batch

    found = judge(model, collate, case.samples, labels="shifted")
    assert found.passed, str(found)
    assert judge(model, right, case.samples, labels="shifted").faults[:1] == ("label shift",)


@pytest.mark.parametrize(("given", "said"), [("folder", "a string"), (None, "None")])
def test_a_model_that_is_none_is_refused(cases: Any, given: Any, said: str) -> None:
    """A folder where the model belongs, say."""
    case = cases("llama")
    expected = r"a transformers model, as AutoModelForImageTextToText.from_pretrained\(folder\)"
    with pytest.raises(vlmpack.VlmpackError, match=f"judge: model is {said}; expected {expected}"):
        judge(given, padded, case.samples)
    with pytest.raises(vlmpack.VlmpackError, match="judge: stock= is a string; expected"):
        judge(case.model(), padded, case.samples, stock="folder")
    with pytest.raises(vlmpack.VlmpackError, match=r"a sample is None\. Expected a mapping"):
        judge(case.model(), padded, [None, None])


@pytest.mark.slow
def test_what_cannot_be_judged_is_said(cases: Any) -> None:
    case = cases("qwen2_5_vl")
    model = load(case.folder, case.encoder, packed=False)
    with pytest.raises(vlmpack.VlmpackError, match="packing needs two or more"):
        judge(model, padded, case.samples[:1])
    with pytest.raises(vlmpack.VlmpackError, match="Expected a mapping with input_ids"):
        judge(model, padded, ["a", "b"])
    silent = [
        {**one, "labels": torch.full_like(one["labels"], IGNORE_INDEX)} for one in case.samples
    ]
    with pytest.raises(vlmpack.VlmpackError, match="no sample has a label token"):
        judge(model, padded, silent)

    def raises(samples: Any) -> Any:
        raise KeyError("length")

    place = "raised KeyError: 'length' (test_judge.py, line "
    for collate, said in (
        (raises, place),
        (lambda _: 3, "returned an int; expected a mapping with input_ids (B, S), labels (B, S)"),
        (lambda _: None, "returned None; expected a mapping"),
    ):
        found = judge(model, collate, case.samples)
        assert found.faults == ("refused",) and said in str(found), str(found)
    short = judge(model, lambda s: {**padded(s), "position_ids": torch.zeros(1, 2)}, case.samples)
    assert not short.passed


def test_what_comes_back_is_looked_at_each_time(cases: Any) -> None:
    """Of changed samples and of micro-batches, too."""
    case = cases("llama")
    right = packing(case.model())
    for times in (1, len(case.samples) + 1):
        calls: list[int] = []

        def collate(samples: Any, times: int = times, calls: list[int] = calls) -> Any:
            calls.append(len(samples))
            batch = dict(right(samples))
            if len(calls) > times:
                del batch["labels"]
            return batch

        with pytest.raises(vlmpack.VlmpackError, match="returned a mapping without labels"):
            case.judge(collate=collate, step=by_token)


@pytest.mark.cases(quick="step", slow="*")
@pytest.mark.parametrize("code", ["collate", "change", "step", "losses", "losses of another kind"])
def test_what_raises_in_a_later_call_is_a_finding(cases: Any, code: str) -> None:
    """The first batch is right; then somebody's code meets what it does not take."""
    case = cases("llama")
    right = packing(case.model())
    calls: list[str] = []

    def later(name: str, value: Any) -> Any:
        calls.append(name)
        if name == code and (name in ("change", "step") or calls.count(name) > 1):
            raise KeyError("length")
        return value

    def losses(model: Any, batch: Any) -> Any:
        found = later("losses", losses_of(model, batch))
        return float(found.detach().mean()) if code == "losses of another kind" else found

    found = case.judge(
        collate=lambda samples: later("collate", right(samples)),
        change=lambda sample: later("change", sample),
        step=lambda model, batches: later("step", by_token(model, batches)),
        losses=losses if "losses" in code else None,
    )
    if code == "losses of another kind":
        said = "losses= returned a float; expected a tensor"
    else:
        said = "changed samples or some of them, raised KeyError: 'length' (test_judge.py, line "
    assert "refused" in found.faults and said in str(found), str(found)
    assert calls.count(code) > 0 or "kind" in code


def run_page(block: int, name: str = "") -> dict[str, Any]:
    """Names that a block of code of docs/judge.md leaves."""
    page = (ROOT / "docs" / "judge.md").read_text()
    names: dict[str, Any] = {"__name__": name}
    exec(page.split("```python\n")[block].partition("```")[0], names)
    return names


@pytest.mark.slow
def test_the_page_judges_a_collator_with_images(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it stands; with the pixels of two samples in each other's place it says so."""
    monkeypatch.chdir(ROOT)
    names = run_page(2, "__main__")
    assert capsys.readouterr().out.splitlines()[-1] == "right; not judged: positions"
    right, samples = names["padded"], names["samples"]
    grids = [one["image_grid_thw"].tolist() for one in samples]
    assert grids[0] == grids[2] != grids[1], "pixels of one size, which no shape tells apart"

    def swapped(ones: Any) -> Any:
        return right(ones) | {"pixel_values": right(ones[::-1])["pixel_values"]}

    assert judge(names["model"], right, samples).passed
    assert judge(names["model"], swapped, samples).faults == ("pixels swapped",)


def test_the_page_judges_transformers_own_collator(cases: Any) -> None:
    """docs/judge.md: with sdpa, which sees boundaries in positions alone."""
    names = run_page(1)
    case = cases("llama")
    texts = [one["input_ids"].tolist() for one in case.samples]
    found = names["judge_flattening"](case.folder, texts)
    assert found.samples == len(texts) and found.label_tokens == sum(len(t) - 1 for t in texts)
    said = {one.check.name: one.check.status for one in found.findings}
    assert said["labels"] == said["positions"] == "pass", str(found)
