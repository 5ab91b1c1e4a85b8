"""Rows of `benchmarks/gpu_table.py` take their branches for CUDA, before a GPU is paid for."""

from __future__ import annotations

import sys
from unittest.mock import patch

import pytest
from fake_cuda.guard import run_under_guard, why_not
from support.shards import ROOT

BENCHMARKS = ROOT / "benchmarks"
with patch.object(sys, "path", [str(BENCHMARKS), *sys.path]):
    from gpu_table import LORA, TINY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

FULL = {"shape": "tiny", "rows": 2, "tokens": 512}
ADAPTED = {**LORA, **FULL}
PAIRS = {**ADAPTED, "pairs": True}
HYBRID = {**FULL, "shape": TINY["qwen3_5-2b"]}


def test_rows_run_on_cuda_in_bfloat16() -> None:
    """The Trainer, in autocast as our step is, has its losses within the rounding of bfloat16."""
    asked = [
        {"kind": "kernels"},
        {"kind": "step", "asked": FULL},
        {"kind": "trainer", "asked": FULL, "attention": "sdpa"},
        {"kind": "step", "asked": ADAPTED},
        {"kind": "trainer", "asked": ADAPTED, "attention": "sdpa"},
        {"kind": "step", "asked": PAIRS},
        {"kind": "step", "asked": HYBRID},
    ]
    kernels, *rows = run_under_guard("fake_cuda.measured_rows", asked, beside=[BENCHMARKS])
    assert [len(each) for each in kernels["seconds"].values()] == [1, 1, 2]
    for row, given in zip(rows, asked[1:], strict=True):
        assert len(row["step_seconds"]) == 1 and len(row["losses"]) == 3 and row["peak"] == 1
        if given["kind"] == "step":
            assert row["description"]["device"] == "cuda:0"
            assert row["description"]["compute dtype"] == "bfloat16"
            assert row["loss_difference"] < 1e-5
    full, stock, adapted, peft = (row["losses"] for row in rows[:4])
    assert stock == pytest.approx(full, rel=1e-4)
    assert peft[0] == pytest.approx(adapted[0], rel=1e-4)  # later ones follow the adapters drawn
    assert full[2] != pytest.approx(adapted[2], rel=1e-2), "a loss that no training moves"
