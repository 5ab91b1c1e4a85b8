"""`vlmpack.judge` on CUDA: in float32, and in bfloat16 with a varlen kernel in the place of the
exact attention; `tests/fake_cuda/test_judge.py` takes the same ways without a GPU.

With TF32, which torch allows convolutions, a right collator's losses differ by 1e-5 (2026-11-26, an
H200), and `test_right_ones_pass` fails.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from support.foreign import broken, packing, padded
from support.judged import Case, on_kernel

from vlmpack.proof.judge import judge

DEVICE = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = ("qwen2_5_vl", "llama")
FAULTS = ("isolation", "other positions", "label shift", "labels on padding")
KERNELS = [
    "torch_varlen",
    pytest.param(
        "flash_attn",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed"
        ),
    ),
]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: Any, tmp_path_factory: Any) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("packed", [True, False])
def test_right_ones_pass(case: Case, packed: bool) -> None:
    model = case.model(packed=packed).to(DEVICE)
    found = judge(model, packing(case.model()) if packed else padded, case.samples)
    print(found)
    assert found.passed, str(found)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(case: Case, fault: str) -> None:
    collate = broken(packing(case.model()), fault)
    found = judge(case.model().to(DEVICE), collate, case.samples)
    assert found.faults == (fault,), str(found)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_kernels_of_half_types_are_judged(case: Case, name: str, fault: str) -> None:
    collate = packing(case.model())
    collate = broken(collate, fault) if fault else collate
    found = judge(on_kernel(case, case.model(), name, DEVICE), collate, case.samples)
    print(found)
    assert found.faults == ((fault,) if fault else ()), str(found)
