"""Run in ranks: policies of what is trained, in layouts of both engines.

    torchrun --nproc-per-node 2 trained_parts.py FOLDER

Writes what the hf engine exports, and FOLDER/<case>.json and .safetensors, as
`support.layouts.Trained` does: all parameters under transformers' names, adapters' own beside them.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support.checkpoints import save_engine
from support.engines import ADAMW, engine_of, make_engine, make_stepper
from support.layouts import LAYOUTS, Layout, Trained, one_layout, train
from support.shards import TINY_MODEL
from torch.distributed.tensor import DTensor

from vlmpack.backends.policy import TrainingPolicy
from vlmpack.distributed import Ranks, start_process_group, stop_process_group
from vlmpack.encode import Encoder
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
