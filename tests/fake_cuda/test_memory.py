"""Bytes that a rank holds, counted in a world of 8 that one process plays, beside those of plan."""

from __future__ import annotations

from functools import cache

import pytest
from fake_cuda.guard import run_under_guard, why_not

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

STATE_TOLERANCE, ACTIVATION_TOLERANCE = 0.05, 0.1
"""Relative: the bounds that `vlmpack plan` is held to."""

FSDP = {"sharding": "fsdp"}
SHARDED = {"distributed_optimizer": True}
LORA = {"vision": "frozen", "language": "lora"}
LAYOUTS = {
    "one process, float32": {"dtype": "float32"},
    "one GPU": {},
    "one GPU, rounded": {"master": "bfloat16_stochastic"},
    "one GPU, LoRA": LORA,
    "one GPU, LoRA, stored narrow": {"stored": "bfloat16", **LORA},
    "one process, LoRA, float32": {"dtype": "float32", **LORA},
    "FSDP2, float32": {"dtype": "float32", "split": FSDP},
    "FSDP2": {"split": FSDP},
    "FSDP2, LoRA": {"split": FSDP, **LORA},
    "DDP, float32": {"dtype": "float32", "split": {}},
    "TP 2, SP, PP 2": {
        "backend": "mcore",
        "split": {"tensor": 2, "sequence": True, "pipeline": 2, **SHARDED},
    },
    "TP 2": {"backend": "mcore", "split": {"tensor": 2}},
    "CP 2, PP 2, float32": {
        "backend": "mcore",
        "dtype": "float32",
        "split": {"context": 2, "pipeline": 2, **SHARDED},
    },
    "DP 8": {"backend": "mcore", "split": SHARDED},
    "one GPU, fused": {"fused": "liger"},
    "one GPU, LoRA, fused": {"fused": "liger", **LORA},
    "FSDP2, fused": {"fused": "liger", "split": FSDP},
    "DP 8, fused": {"fused": "liger", "backend": "mcore", "split": SHARDED},
}


@cache
def _compared() -> dict[str, dict[str, dict[str, int]]]:
    given = [{"name": name, **layout} for name, layout in LAYOUTS.items()]
    return dict(zip(LAYOUTS, run_under_guard("fake_cuda.memory", given), strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("what", ["parameters", "gradients", "optimizer", "activations"])
def test_plan_says_what_a_rank_holds(name: str, what: str) -> None:
    found = _compared()[name]
    counted, planned = found["counted"][what], found["planned"][what]
    assert counted > 0
    bound = ACTIVATION_TOLERANCE if what == "activations" else STATE_TOLERANCE
    assert planned == pytest.approx(counted, rel=bound)


def test_the_layouts_differ() -> None:
    """A count that sees no layout would be the same in all."""
    found = {name: each["counted"] for name, each in _compared().items()}
    whole = found["one process, float32"]
    assert found["FSDP2, float32"]["optimizer"] < whole["optimizer"] / 7
    assert found["DDP, float32"]["optimizer"] == whole["optimizer"]
    rounded = found["one GPU, rounded"]
    for what in ("parameters", "gradients", "optimizer"):
        assert rounded[what] < 0.7 * found["one GPU"][what], what
    assert found["one GPU, LoRA"]["gradients"] < whole["gradients"] / 4
    narrow = found["one GPU, LoRA, stored narrow"]["parameters"]
    assert narrow < 0.45 * found["one GPU, LoRA"]["parameters"], "2 bytes a weight instead of 6"
    for name in ("one GPU", "FSDP2", "DP 8"):
        plain, fused = (found[each]["activations"] for each in (name, f"{name}, fused"))
        assert fused < 0.8 * plain  # more than the bound, so that plan is seen to tell them apart
    assert found["TP 2"]["activations"] < found["DP 8"]["activations"] / 1.3
    assert found["CP 2, PP 2, float32"]["activations"] < whole["activations"] / 2
