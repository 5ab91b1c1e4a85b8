"""Inputs of layers that wait on the host: a run learns what it learns without, bit for bit."""

from __future__ import annotations

import pytest
import torch
from fake_cuda.guard import run_under_guard, why_not

from vlmpack.backends.offload import Offload
from vlmpack.errors import CapabilityError

FAULT = "other numbers"


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_offloaded_inputs_change_nothing() -> None:
    found = run_under_guard("fake_cuda.offloaded", {"qwen2_5_vl": ["", FAULT], "gemma4": [""]})
    # Gemma 4's layers have per-layer inputs beside hidden states.
    for family, layers, inputs_of_a_layer, blocks in (("qwen2_5_vl", 4, 1, 4), ("gemma4", 6, 2, 2)):
        out = layers * inputs_of_a_layer + blocks
        back = out - inputs_of_a_layer  # the last layer's are still there
        counts = {"out": 4 * out, "back": 4 * back, "late": 0}  # four micro-batches
        assert found[family][""] == {"same": True, **counts}
    assert not found["qwen2_5_vl"][FAULT]["same"], "nobody reads what came back"


def test_a_cpu_has_nothing_to_move() -> None:
    with pytest.raises(CapabilityError, match=r"activation_offloading: true moves .* on cpu"):
        Offload(lambda *_: None, torch.device("cpu"))
