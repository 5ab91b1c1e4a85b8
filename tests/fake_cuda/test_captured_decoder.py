"""The decoder is captured on the GPU that a CPU plays: torch's varlen kernel in bfloat16 runs the
same operators for every row of the shape, and a tape of them gives what the code gives."""

from __future__ import annotations

from typing import Any

import pytest
from fake_cuda.captured import Seen
from fake_cuda.guard import run_under_guard, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")


@pytest.fixture(scope="module")
def seen() -> dict[str, Seen]:
    answers: list[dict[str, Any]] = run_under_guard(
        "fake_cuda.captured", [{"family": name} for name in FAMILIES]
    )
    return dict(zip(FAMILIES, (Seen(**answer) for answer in answers), strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_captured_decoder_replays_on_the_kernels_for_cuda(
    name: str, seen: dict[str, Seen]
) -> None:
    found = seen[name]
    assert found.error == ""
    assert found.attention.startswith("torch_varlen")
    assert found.captures == 1 and found.replays == len(found.operators) > 3
    assert min(found.operators) > 500 and found.difference is None
    assert found.reads == []
    assert found.unlike == [] and found.gradients > 50
