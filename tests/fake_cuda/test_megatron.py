"""The mcore engine's optimizer step on the GPU that a CPU plays, and on ranks of larger layouts.

Of a larger layout one rank is traced: its branches, devices and waits, and what it sends to the
stages beside it and wants from them. Its numbers are its own at DP alone."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
from fake_cuda.guard import run_under_guard, why_not
from fake_cuda.waits import unknown_waits

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

LAYOUTS: dict[str, dict[str, Any]] = {
    "DP 8": {"split": {"distributed_optimizer": True}},
    "TP 2, SP": {"split": {"tensor": 2, "sequence": True}},
    "CP 2": {"split": {"context": 2}},
    "PP 2, first": {"split": {"pipeline": 2}},
    "PP 2, last": {"split": {"pipeline": 2}, "stage": 1},
    "PP 2, told": {"split": {"pipeline": 2}, "stage": 1, "told": True},
    "TP 2, SP, CP 2, PP 2, last": {
        "split": {"tensor": 2, "sequence": True, "context": 2, "pipeline": 2},
        "stage": 1,
    },
}
"""`told`: senders say widths, as Megatron does by itself."""
IN_CI = ("DP 8", "TP 2, SP, CP 2, PP 2, last")


def marked(names: Iterable[str]) -> list[Any]:
    """Each with the mark of its process."""
    return [pytest.param(n, marks=() if n in IN_CI else pytest.mark.soak) for n in names]


@cache
def _ran(in_ci: bool) -> dict[str, dict[str, Any]]:
    """All of one mark, in one process."""
    given = {name: layout for name, layout in LAYOUTS.items() if (name in IN_CI) == in_ci}
    return dict(zip(given, run_under_guard("fake_cuda.megatron", [*given.values()]), strict=True))


def _seen(name: str) -> dict[str, Any]:
    return _ran(name in IN_CI)[name]


@pytest.mark.parametrize("layout", marked(LAYOUTS))
def test_a_step_takes_every_branch_for_the_device(layout: str) -> None:
    seen = _seen(layout)
    assert seen["error"] == ""
    ran = "segments (with context parallelism" if "CP" in layout else "torch_varlen"
    assert seen["attention"].startswith(ran)
    assert seen["fused"].startswith("norms and rotations: triton (first choice")
    assert seen["fused"].endswith("SwiGLU: Megatron's")
    assert seen["elsewhere"] == []
    assert seen["without_gradient"] == []
    if "told" not in layout:
        assert unknown_waits("qwen2_5_vl", seen["waits"]) == []


@pytest.mark.parametrize("layout", marked(name for name in LAYOUTS if "PP" in name))
def test_stages_exchange_hidden_states_alone(layout: str) -> None:
    """One forward and one backward, in the order of the micro-batches, which differ in width."""
    seen = _seen(layout)
    hidden, traffic = seen["hidden"], seen["traffic"]
    assert len({width for width, _, _ in hidden}) == len(hidden) == 3
    there = [each for each in traffic if each[3] == "torch.bfloat16"]
    for way in ("isend", "irecv"):
        assert [shape for name, _, shape, _ in there if name == way] == hidden
    peer = 4 if "first" in layout else 0
    assert {rank for _, rank, _, _ in traffic} == {peer}
    assert (len(there) == len(traffic)) is ("told" not in layout)


@pytest.mark.soak
def test_stages_that_are_told_widths_wait() -> None:
    """Three times a message; numbers are those of stages that know them."""
    told, known = _seen("PP 2, told"), _seen("PP 2, last")
    places = [place for _, place in unknown_waits("qwen2_5_vl", told["waits"])]
    assert len(places) >= 2 * len(told["hidden"])
    assert all("pipeline_parallel/p2p_communication.py" in place for place in places)
    assert told["grad_norm"] == known["grad_norm"] > 0


def test_a_replica_computes_what_it_does_on_the_cpu() -> None:
    """Sums over replicas are its own: the others are no processes."""
    seen = _seen("DP 8")
    assert seen["loss"] == pytest.approx(seen["cpu_loss"], rel=5e-3)
    assert seen["grad_norm"] == pytest.approx(seen["cpu_grad_norm"], rel=2e-2)
    assert seen["loss"] != seen["cpu_loss"]  # it was bfloat16
