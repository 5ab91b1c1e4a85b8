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
    found = run_under_guard("fake_cuda.offloaded", ["", FAULT])
    # Four micro-batches through four layers and four blocks of the tower.
    assert found[""] == {"same": True, "copies": 4 * 8}
    assert not found[FAULT]["same"], "nobody reads what came back"


def test_a_cpu_has_nothing_to_move() -> None:
    with pytest.raises(CapabilityError, match=r"activation_offloading: true moves .* on cpu"):
        Offload(lambda *_: None, torch.device("cpu"))
