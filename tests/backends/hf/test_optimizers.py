"""bitsandbytes' optimizers in the hf engine, against torch's, in a process that has it.

Its own kernels for CPUs run here; `tests/gpu` asks the same of those for CUDA.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.references import path_of

from vlmpack.backends.hf.optimizer import require_bitsandbytes
from vlmpack.errors import CapabilityError
from vlmpack.forecast.trained import MomentBytes, MomentSizes
from vlmpack.recipe.trainable import FACTS

IN_8_BITS = [name for name, facts in FACTS.items() if facts.in_8_bits]

SAME = 1e-5
"""Of 32-bit moments: the rounding of another order of the same operations."""
NEAR = (0.01, 0.2)
"""Of 8-bit moments, as far as they have come: steps are others, and in the same direction."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `support.optimizers` found."""
    folder = tmp_path_factory.mktemp("optimizers")
    ran = subprocess.run(
        [sys.executable, "-m", "support.optimizers", str(folder)],
        env=path_of("bitsandbytes", folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.soak
def test_steps_are_those_of_torchs_adamw_as_far_as_the_bits_reach(found):
    distance = found["distance"]
    assert distance.keys() == {"adamw_8bit", "paged_adamw"}
    for name, far in distance.items():
        print(f"{name}: {far:.1e}")
        if name in IN_8_BITS:
            assert NEAR[0] < far < NEAR[1], name
        else:
            assert far < SAME, name


@pytest.mark.soak
def test_a_resumed_run_has_the_bits_of_the_unbroken_one(found):
    assert found["resumed"] == {"adamw_8bit": [], "paged_adamw": []}
    assert len(found["control"]) > 100, "scales that are lost are not seen"


@pytest.mark.soak
@pytest.mark.parametrize("what", ["full", "lora"])
@pytest.mark.parametrize("name", FACTS)
def test_plan_counts_what_an_engine_holds(found, name, what):
    held, (on_device, in_pages) = found["bytes"][f"{name} {what}"]
    assert on_device + in_pages == pytest.approx(held, rel=0.001)
    assert (in_pages > 0) == FACTS[name].paged
    plain, _ = found["bytes"][f"adamw {what}"]
    assert held < 0.3 * plain if name in IN_8_BITS else held == plain


def test_bytes_of_moments_by_hand():
    shapes = [(4095,), (64, 64), (1000, 100)]
    updated = 4095 + 4096 + 100_000
    sizes = {name: MomentSizes.of(facts, shapes) for name, facts in FACTS.items()}
    scales = 2 * 4 * (4096 + 100_000) // 256
    assert sizes["adamw"].bytes_of(updated) == MomentBytes(8 * updated, 0)
    eight = 8 * 4095 + 2 * 104_096 + scales
    assert sizes["adamw_8bit"].bytes_of(updated) == MomentBytes(eight, 0)
    assert sizes["paged_adamw"].bytes_of(updated) == MomentBytes(8 * 8191, 800_000)
    assert sizes["paged_adamw_8bit"].bytes_of(updated) == MomentBytes(eight - 200_000, 200_000)
    assert MomentSizes().bytes_of(10) == MomentBytes(80, 0)


@pytest.mark.parametrize(
    ("there", "said"), [(None, "which is not installed"), ("0.46.1", "here is 0.46.1")]
)
def test_a_package_that_is_missing_or_old_is_named(monkeypatch, there, said):
    module = "vlmpack.backends.hf.optimizer"
    monkeypatch.setattr(f"{module}.util.find_spec", lambda name: there and object())
    monkeypatch.setattr(f"{module}.metadata.version", lambda name: there)
    with pytest.raises(CapabilityError, match=rf"bitsandbytes 0\.50 or newer, {said}; pip install"):
        require_bitsandbytes("optim.name: 'adamw_8bit'", "adamw")


@pytest.mark.parametrize("there", ["0.50", "0.50.2", "0.61.0.dev0", "1.0.0"])
def test_a_package_that_is_new_enough_is_taken(monkeypatch, there):
    module = "vlmpack.backends.hf.optimizer"
    monkeypatch.setattr(f"{module}.util.find_spec", lambda name: object())
    monkeypatch.setattr(f"{module}.metadata.version", lambda name: there)
    require_bitsandbytes("optim.name: 'adamw_8bit'", "adamw")
