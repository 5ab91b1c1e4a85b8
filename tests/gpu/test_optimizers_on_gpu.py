"""bitsandbytes' optimizers on CUDA, against torch's; pages are the GPU's and the host's together.

Run on an H200 on 2026-11-26. On a CPU, by its kernels for that, in tests/backends/hf.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from support.optimizers import FULL, LORA, distance_of, reloaded, state_bytes

from vlmpack.recipe.trainable import FACTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
    ),
]
OTHERS = [name for name in FACTS if name != "adamw"]
DEVICE = torch.device("cuda", 0)
SAME, NEAR = 1e-3, 0.2
"""As far as the weights have come: of 32 bits, gradients being summed in any order, and of 8."""


@pytest.mark.parametrize("name", OTHERS)
def test_steps_are_those_of_torchs_adamw_as_far_as_the_bits_reach(name):
    far = distance_of(name, DEVICE)
    print(f"\n{name}: {far:.1e}")
    assert 0 < far < (NEAR if FACTS[name].in_8_bits else SAME)


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_has_weights_and_moments_bit_for_bit(name, tmp_path):
    assert reloaded(name, DEVICE, tmp_path) == []


@pytest.mark.parametrize("trainable", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", OTHERS)
def test_plan_counts_what_an_engine_holds(name, trainable):
    held, (on_device, in_pages) = state_bytes(name, DEVICE, trainable)
    assert on_device + in_pages == pytest.approx(held, rel=0.001)
