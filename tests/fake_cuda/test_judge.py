"""`vlmpack.judge` over a model on the GPU that a CPU plays: batches of the CPU find their way, and
what is compared comes back."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any

import pytest
from fake_cuda.guard import run_under_guard, why_not
from fake_cuda.judged import Found, Judged

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

RIGHT = (
    Judged(family="qwen2_5_vl"),
    Judged(family="qwen2_5_vl", packed=False),
    Judged(family="llama", batches="cuda"),
    Judged(family="llama", own=True),
    Judged(family="llama", stock="cpu"),
)
WRONG = tuple(
    Judged(family="qwen2_5_vl", fault=fault)
    for fault in ("isolation", "one-axis positions", "pixels swapped", "labels on padding")
)
HALF = tuple(Judged(family="qwen2_5_vl", fault=fault, half=True) for fault in ("", "isolation"))
CASES = (*RIGHT, *WRONG, *HALF)


def found_of(case: Judged) -> Found:
    return _ran()[case]


@cache
def _ran() -> dict[Judged, Found]:
    """All, in one process."""
    answers: list[dict[str, Any]] = run_under_guard(
        "fake_cuda.judged", [asdict(case) for case in CASES]
    )
    return dict(zip(CASES, (Found(**answer) for answer in answers), strict=True))


@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_right_ones_pass_on_a_gpu(case: Judged) -> None:
    found = found_of(case)
    assert found.error == ""
    assert found.faults == [], found.said
    shown = {name: status for name, status in found.statuses.items() if status != "pass"}
    # Rows that are padded have no positions: the model counts them.
    assert shown == ({} if case.packed else {"positions": "not shown"}), found.said
    assert {"labels", "isolation", "average", "gradients: language model"} <= found.statuses.keys()


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_faults_are_named_on_a_gpu(case: Judged) -> None:
    found = found_of(case)
    assert found.error == ""
    assert found.faults == [case.fault], found.said


@pytest.mark.parametrize("case", HALF, ids=str)
def test_kernels_of_half_types_are_judged_on_a_gpu(case: Judged) -> None:
    found = found_of(case)
    assert found.error == ""
    assert found.faults == ([case.fault] if case.fault else []), found.said
    assert found.statuses["loss of each sample"] == "shown"
    assert found.statuses["positions"] == "pass"
