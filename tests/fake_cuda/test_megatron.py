"""The mcore engine's optimizer step on the GPU that a CPU plays, and on ranks of larger layouts.

Not traced: context parallelism without Transformer Engine (torch's CausalBias cannot be made while
operators are watched), and what travels between pipeline stages.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from fake_cuda.guard import run_under_guard, why_not
from fake_cuda.waits import BACKWARD, OURS, THIRD_PARTY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

LAYOUTS: dict[str, dict[str, Any]] = {
    "DP 8": {"distributed_optimizer": True},
    "TP 2, SP": {"tensor": 2, "sequence": True},
    "PP 2": {"pipeline": 2},
}


@cache
def _seen() -> dict[str, dict[str, Any]]:
    given = [{"split": split} for split in LAYOUTS.values()]
    return dict(zip(LAYOUTS, run_under_guard("fake_cuda.megatron", given), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_takes_every_branch_for_the_device(layout: str) -> None:
    seen = _seen()[layout]
    assert seen["error"] == ""
    assert seen["attention"].startswith("torch_varlen")
    assert seen["elsewhere"] == []
    assert seen["without_gradient"] == []
    waits = [(what, place) for what, place in seen["waits"]]
    own = [wait for wait in waits if wait[1].startswith(f"{OURS[1]}:")]
    assert [what for what, _ in own] == [OURS[0]] * ("PP" not in layout)  # no step, its parts
    known = {(what, "backward") for what in BACKWARD.get("qwen2_5_vl", ())}
    unknown = [wait for wait in waits if wait not in own and wait not in known]
    assert [wait for wait in unknown if wait[1] not in THIRD_PARTY] == []


def test_a_replica_computes_what_it_does_on_the_cpu() -> None:
    """Sums over replicas are its own: the others are no processes."""
    seen = _seen()["DP 8"]
    assert seen["loss"] == pytest.approx(seen["cpu_loss"], rel=5e-3)
    assert seen["grad_norm"] == pytest.approx(seen["cpu_grad_norm"], rel=2e-2)
    assert seen["loss"] != seen["cpu_loss"]  # it was bfloat16
