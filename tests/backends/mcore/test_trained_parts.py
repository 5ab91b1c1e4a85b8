"""Frozen components, learning rates of their own and adapters, in two processes of either engine:
the optimizer steps are those of the hf engine in one process with the same policy.

Run in ranks: policies of what is trained, in layouts of both engines.

    torchrun --nproc-per-node 2 test_trained_parts.py FOLDER

Writes what the hf engine exports, and FOLDER/<case>.json and .safetensors, as
`support.layouts.Trained` does: all parameters under transformers' names, adapters' own beside them.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import layouts
from support.checkpoints import save_engine
from support.engines import ADAMW, engine_of, make_engine, make_stepper
from support.forked import check_ranks
from support.layouts import LAYOUTS, Layout, Trained, one_layout, train
from support.shards import TINY_MODEL
from torch.distributed.tensor import DTensor

from vlmpack.backends.policy import TrainingPolicy, component_of
from vlmpack.distributed import Ranks, start_process_group, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.families.registry import family_of
from vlmpack.recipe.schema import ModelSection
from vlmpack.recipe.trainable import LoraSection, TrainableSection
from vlmpack.training.checkpoint import load_checkpoint, step_folder

STEPS = 3


def _policy(trainable: dict[str, Any], **scales: float) -> TrainingPolicy:
    """Learning rates of components as multiples of the schedule's."""
    rates = {f"{name}_lr": scale * ADAMW.lr for name, scale in scales.items()}
    return TrainingPolicy(
        trainable=TrainableSection(**trainable), optim=ADAMW.model_copy(update=rates), seed=1
    )


POLICIES = {
    "no tower": _policy({"vision": "frozen"}, projector=4.0, language=0.5),
    "no language": _policy({"projector": "frozen", "language": "frozen"}, vision=0.5),
    "adapters": _policy(
        {"vision": "frozen", "language": "lora", "lora": LoraSection(rank=3, alpha=6.0)},
        projector=0.5,
    ),
}

CASES = {
    "pp2, no language": ("pp2", "no language"),
    "dp2, no tower": ("dp2", "no tower"),
    "tp2, no tower": ("tp2", "no tower"),
    "fsdp, adapters": ("fsdp", "adapters"),
    "ddp, adapters": ("none", "adapters"),
}
"""(layout of the mcore engine, or sharding of the hf engine; policy). In pp2 without the language
model the last stage trains nothing."""

GOES_ON_FROM = {"tp2, no tower": "dp2, no tower", "ddp, adapters": "fsdp, adapters"}
"""Cases that load what another saved before its last step, and take that one."""


def reference(policy: str) -> tuple[Trained, dict[str, Any]]:
    """The hf engine in one process, and where it began."""
    engine = make_engine(TINY_MODEL, Encoder(TINY_MODEL), policy=POLICIES[policy])
    start = {name: p.detach().clone() for name, p in engine.vlm.model.named_parameters()}
    rows = train(make_stepper(engine, check=True), LAYOUTS["one"], STEPS)
    weights = {name: p.detach() for name, p in engine.vlm.model.named_parameters()}
    return Trained(rows, weights), start


def train_or_go_on(case: str, engine: Any, layout: Layout, folder: Path) -> list[list[float]]:
    """(loss, gradient norm) by step; saved before the last one where another case needs it."""
    stepper, ranks = make_stepper(engine, check=True), engine.ranks
    source = GOES_ON_FROM.get(case)
    if source is None:
        rows = train(stepper, layout, STEPS - 1)
        if case in GOES_ON_FROM.values():
            save_engine(folder / f"{case}-saved", STEPS - 1, engine, keep=1, ranks=ranks)
    else:
        load_checkpoint(step_folder(folder / f"{source}-saved", STEPS - 1), engine, ranks)
        rows = ranks.on_main(lambda: Trained.load(folder / source).rows[:-1])
    return rows + train(stepper, layout, 1)


def hf_case(case: str, ranks: Ranks, folder: Path) -> Trained:
    """Two replicas; FOLDER/<sharding>-merged and -adapter are what they export."""
    sharding, policy = CASES[case]
    engine = make_engine(
        TINY_MODEL, Encoder(TINY_MODEL), ranks=ranks, policy=POLICIES[policy], sharding=sharding
    )
    rows = train_or_go_on(case, engine, LAYOUTS["dp2"], folder)
    engine.export(folder / f"{sharding}-merged", processor_from=TINY_MODEL, dtype=None)
    engine.export_adapter(folder / f"{sharding}-adapter", base=str(TINY_MODEL))
    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in engine.vlm.model.named_parameters()
    }
    return Trained(rows, weights)


def mcore_case(case: str, ranks: Ranks, folder: Path) -> Trained:
    """Both processes share the model, or hold copies."""
    layout, policy = CASES[case]
    model = ModelSection(
        path=str(TINY_MODEL), backend="mcore", dtype="float32", attention="segments"
    )
    encoder = Encoder(TINY_MODEL)
    engine = engine_of(model, LAYOUTS[layout].sizes, encoder, ranks, POLICIES[policy])
    rows = train_or_go_on(case, engine, LAYOUTS[layout], folder)
    assert engine.parameter_shapes().keys() < engine.shapes.keys()
    written = {box.name for _, box, _ in engine.owned_slices()}
    assert written <= engine.parameter_shapes().keys()
    held = {
        piece.box.name: (local.parameter[piece.start : piece.stop], piece.box)
        for local in engine.layout.parameters
        for piece in local.pieces
        if not local.parameter.requires_grad
    }
    files = load_file(str(TINY_MODEL / "model.safetensors"))
    for name, (rows_held, box) in held.items():  # what was computed with, not what is exported
        if name in files:
            assert torch.equal(rows_held.flatten(), files[name][box.index].float().flatten()), name
    return Trained(rows, {name: value.clone() for name, value in engine.whole_tensors()})


def main(folder: Path) -> None:
    """Every case."""
    for name, (layout, _) in CASES.items():
        is_mcore = layout in LAYOUTS
        context = one_layout(LAYOUTS[layout]) if is_mcore else nullcontext(start_process_group())
        with context as ranks:
            trained = (mcore_case if is_mcore else hf_case)(name, ranks, folder)
            if ranks.is_main:
                trained.save(folder / name)
    stop_process_group()


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    check_ranks([__file__, folder], 2)
    return folder


@pytest.fixture(scope="module")
def expected():
    return cache(reference)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_the_same_parts_alike(results, expected, case):
    found = Trained.load(results / case)
    _, policy = CASES[case]
    reference, start = expected(policy)
    assert len(found.rows) == STEPS
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


@pytest.mark.parametrize("case", CASES)
def test_what_is_frozen_stays_and_what_is_trained_moves(results, expected, case, tiny_folder):
    found = Trained.load(results / case)
    _, name = CASES[case]
    _, start = expected(name)
    policy, paths = POLICIES[name], family_of(tiny_folder).modules
    moved = {n for n, value in found.weights.items() if not torch.equal(value, start[n])}
    trained = {n for n, v in start.items() if policy.trains_parameter(n, paths)}
    assert moved == trained
    assert {component_of(n, paths) for n in set(start) - moved} >= {
        c for c in ("vision", "projector", "language") if not policy.trains(c)
    }
    assert len(trained) > 4 and len(start) > len(trained)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
