"""`vlmpack.judge` on CUDA: in float32, and in bfloat16 with torch's varlen kernel in the place of
flash-attn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.foreign import packing, padded
from support.judged import Case

from vlmpack.proof.judge import judge

DEVICE = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = ("qwen2_5_vl", "llama")


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: Any, tmp_path_factory: Any) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("packed", [True, False])
def test_right_ones_pass(case: Case, packed: bool) -> None:
    model = case.model(packed=packed).to(DEVICE)
    found = judge(model, packing(case.model()) if packed else padded, case.samples)
    print(found)
    assert found.passed, str(found)


@pytest.mark.parametrize("fault", ["isolation", "other positions", "label shift", "other labels"])
def test_faults_are_named(case: Case, fault: str) -> None:
    from support.foreign import broken

    collate = broken(packing(case.model()), fault)
    found = judge(case.model().to(DEVICE), collate, case.samples)
    assert found.faults == (fault,), str(found)
