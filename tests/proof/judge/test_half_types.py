"""Kernels that take half types alone: what is exact is judged, losses and gradients are shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.foreign import broken, packing
from support.judged import Case, losses_of, statuses

from vlmpack.proof.judge import Judgement, judge

FIGURES = ("loss of each sample", "gradients: embeddings", "gradients: language model", "average")
EXACT = (
    "isolation",
    "positions over the row",
    "other positions",
    "label shift",
    "double shift",
    "labels across samples",
    "labels on padding",
    "other labels",
    "pixels swapped",
    "other pixels",
)


def judged(case: Case, dtype: torch.dtype, fault: str = "", **options: Any) -> Judgement:
    collate = packing(case.model())
    collate = broken(collate, fault) if fault else collate
    return judge(case.model().to(dtype), collate, case.samples, **options)


@pytest.mark.cases(slow="qwen2_5_vl-torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_right_ones_pass_and_the_rest_is_shown(cases: Any, family: str, dtype: torch.dtype) -> None:
    found = judged(cases(family), dtype)
    assert found.passed, str(found)
    said = statuses(found)
    assert {said.pop(name) for name in FIGURES} == {"shown"}
    assert set(said) >= {"labels", "positions", "isolation"}
    assert {status for name, status in said.items() if "gradients" not in name} == {"pass"}
    assert "right; not judged: loss of each sample, " in str(found)


@pytest.mark.cases(slow=("llama-isolation", "llama-label shift", "qwen2_5_vl-pixels swapped"))
@pytest.mark.parametrize("fault", EXACT)
@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_what_is_exact_is_named(cases: Any, family: str, fault: str) -> None:
    case = cases(family)
    if "pixels" in fault and not case.has_images:
        pytest.skip("it has no images")
    assert judged(case, torch.bfloat16, fault).faults == (fault,)


@pytest.mark.slow
def test_losses_that_are_no_numbers_are_a_fault(cases: Any) -> None:
    case = cases("llama")
    lost = judged(case, torch.bfloat16, losses=lambda m, b: losses_of(m, b) * float("nan"))
    assert lost.faults[-2:] == ("other loss", "other gradients"), str(lost)
    fewer = judged(case, torch.bfloat16, losses=lambda m, b: losses_of(m, b)[1:])
    assert "other loss" in fewer.faults, str(fewer)
