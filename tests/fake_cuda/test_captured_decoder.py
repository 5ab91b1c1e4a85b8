"""The decoder is captured on the GPU that a CPU plays: torch's varlen kernel in bfloat16 runs the
same operators for every row of the shape, and a tape of them gives what the code gives."""

from __future__ import annotations

from typing import Any

import pytest
from fake_cuda.captured import Seen
from fake_cuda.guard import run_under_guard, why_not

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

CASES: dict[str, dict[str, Any]] = {
    **{name: {"family": name} for name in ("qwen2_5_vl", "qwen3_5")},
    "LoRA": {"family": "qwen2_5_vl", "language": "lora"},
    "mcore, DP 8": {"family": "qwen3_vl", "split": {"distributed_optimizer": True}},
    "mcore, TP 2, SP": {"family": "qwen2_5_vl", "split": {"tensor": 2, "sequence": True}},
}


@pytest.fixture(scope="module")
def seen() -> dict[str, Seen]:
    answers: list[dict[str, Any]] = run_under_guard("fake_cuda.captured", list(CASES.values()))
    return dict(zip(CASES, (Seen(**answer) for answer in answers), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_captured_decoder_replays_on_the_kernels_for_cuda(
    name: str, seen: dict[str, Seen]
) -> None:
    found = seen[name]
    assert found.error == ""
    assert found.attention.startswith("torch_varlen")
    assert found.captures == 1 and found.replays == len(found.operators) > 3
    assert min(found.operators) > 400 and found.difference is None
    assert found.reads == [] and found.from_host == []
    if "TP 2" in name:  # what comes of others' shares is in nobody's hands
        assert found.collectives > 10
    else:
        least = 20 if name == "LoRA" else 50
        assert found.unlike == [] and found.gradients > least and found.collectives == 0
