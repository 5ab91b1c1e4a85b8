"""Frozen components, learning rates of their own and adapters, in two processes of either engine:
the optimizer steps are those of the hf engine in one process with the same policy."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from support import layouts, trained_parts
from support.forked import check_ranks
from support.layouts import Trained

from vlmpack.backends.policy import component_of
from vlmpack.families.registry import family_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    script = layouts.TESTS / "support" / "trained_parts.py"
    check_ranks([script, folder], 2)
    return folder


@pytest.fixture(scope="module")
def expected():
    return cache(trained_parts.reference)


@pytest.mark.parametrize("case", trained_parts.CASES)
def test_two_processes_train_the_same_parts_alike(results, expected, case):
    found = Trained.load(results / case)
    _, policy = trained_parts.CASES[case]
    reference, start = expected(policy)
    assert len(found.rows) == trained_parts.STEPS
    errors = layouts.worst_errors(found, reference, start)
    print(f"\n{case:18} " + "  ".join(f"{what} {error:.1e}" for what, error in errors.items()))
    assert layouts.beyond_tolerance(errors) == {}


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_two_processes_export_what_they_trained(results, sharding):
    """The weights of the adapter folder are the trained ones; the merged ones by the formula."""
    weights = Trained.load(results / f"{'ddp' if sharding == 'none' else 'fsdp'}, adapters").weights
    held = load_file(str(results / f"{sharding}-adapter" / "adapter_model.safetensors"))
    for name, value in held.items():
        ours = name.removeprefix("base_model.model.")
        ours = ours.replace("lora_A.weight", "lora_A.default.weight")
        ours = ours.replace("lora_B.weight", "lora_B.default.weight")
        assert torch.equal(weights[ours], value), name
    assert sum("lora_B" in name for name in held) == 28
    assert sum("merger" in name for name in held) == 5
    merged = load_file(str(results / f"{sharding}-merged" / "model.safetensors"))
    layer = "model.language_model.layers.1.mlp.up_proj"
    a, b = (weights[f"{layer}.lora_{which}.default.weight"] for which in "AB")
    expected = weights[f"{layer}.base_layer.weight"] + 6.0 / 3 * b @ a
    found = next(
        value for name, value in merged.items() if name.endswith("layers.1.mlp.up_proj.weight")
    )
    assert float(b.abs().max()) > 0
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", trained_parts.CASES)
def test_what_is_frozen_stays_and_what_is_trained_moves(results, expected, case, tiny_folder):
    found = Trained.load(results / case)
    _, name = trained_parts.CASES[case]
    _, start = expected(name)
    policy, paths = trained_parts.POLICIES[name], family_of(tiny_folder).modules
    moved = {n for n, value in found.weights.items() if not torch.equal(value, start[n])}
    trained = {n for n, v in start.items() if policy.of_parameter(n, v.ndim, paths).trains}
    assert moved == trained
    assert {component_of(n, paths) for n in set(start) - moved} >= {
        c for c in ("vision", "projector", "language") if not policy.trains(c)
    }
    assert len(trained) > 4 and len(start) > len(trained)
