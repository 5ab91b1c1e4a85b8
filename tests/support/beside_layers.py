"""Run in ranks: adapters on the Megatron engine, in parallel layouts.

    torchrun --nproc-per-node N beside_layers.py FOLDER JOB [JOB ...]

A job is a name of `CASES` or `CONTROLS`. Writes FOLDER/<job>.json and .safetensors, as
`support.layouts.Trained` does: all parameters under the names of the hf engine's, but for the
`.base_layer` that peft puts into those of adapted layers. Those of `EXPORTED` write what they
export beside it; those of `SAVED` a checkpoint before their last step, from which those of
`GOES_ON_FROM` take it. Those that are `begun` go on with the adapters in FOLDER/begun-<policy>.
FOLDER/<job>-held.txt has the trained elements of the fullest rank.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.checkpoints import save_engine
from support.engines import engine_of, make_engine, policy
from support.family_layouts import FAMILY_LAYOUTS
from support.layouts import (
    BINS,
    LAYOUTS,
    Layout,
    Trained,
    one_layout,
    stepper_with,
    train,
    whole_weights,
)
from support.shards import TINY_MODEL

from vlmpack.backends.hf.adapters import BASE
from vlmpack.backends.mcore import adapters, beside
from vlmpack.backends.mcore.adapters import LinearAdapter
from vlmpack.backends.policy import TrainingPolicy
from vlmpack.build.adapter import go_on_with, open_adapter
from vlmpack.distributed import Ranks, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.recipe.schema import ModelSection
from vlmpack.training.checkpoint import load_checkpoint, step_folder

MOE = "qwen3_vl_moe"
HYBRID = "qwen3_5"
MAMBA = "nemotron_h"
OMNI = "nemotron_h_omni"
STEPS = 3
SGD_LR = 0.05

POLICIES = {
    "lora": policy("frozen", "full", "lora", rank=3, alpha=6.0),
    "dora": policy("frozen", "frozen", "lora", dora=True, rslora=True),
    "tower": policy("lora", "lora", "lora", dora=True),
    "tower, rslora": policy("lora", "lora", "lora", dora=True, rslora=True),
    "some": policy("frozen", "frozen", "lora", targets=("k_proj", "up_proj", "o_proj")),
}
"""In `some` a fused layer has adapters beside a part of it. Tiny Nemotrons begin near even odds,
with a tenth of the others' gradients: under rslora, which doubles what is beside, they learn as
much."""


@dataclass(frozen=True)
class Case:
    """Steps of a policy in a layout; of the tiny model, or of FOLDER/<family>; from new adapters or
    from those of a folder."""

    layout: Layout
    policy: str = "lora"
    optimizer: str = "sgd"
    family: str | None = None
    begun: bool = False

    def model(self, folder: Path) -> Path:
        """The model's folder."""
        return TINY_MODEL if self.family is None else folder / self.family


CASES = {
    "one, dora": Case(LAYOUTS["one"], "dora"),
    "one, tower": Case(LAYOUTS["one"], "tower"),
    "one, some": Case(LAYOUTS["one"], "some"),
    "tp2": Case(LAYOUTS["tp2"]),
    "tp2-sp": Case(LAYOUTS["tp2-sp"]),
    "cp2": Case(LAYOUTS["cp2"]),
    "pp2": Case(LAYOUTS["pp2"]),
    "dp2": Case(LAYOUTS["dp2"]),
    "tp2, adamw": Case(LAYOUTS["tp2"], optimizer="adamw"),
    "dp2, adamw": Case(LAYOUTS["dp2"], optimizer="adamw"),
    "pp2, adamw": Case(LAYOUTS["pp2"], optimizer="adamw"),
    "tp2, dora": Case(LAYOUTS["tp2"], "dora"),
    "tp2-sp, dora": Case(LAYOUTS["tp2-sp"], "dora"),
    "tp2-sp, tower": Case(LAYOUTS["tp2-sp"], "tower"),
    "tp2, some": Case(LAYOUTS["tp2"], "some"),
    "tp2-sp, hybrid": Case(FAMILY_LAYOUTS["tp2"], "dora", family=HYBRID),
    "cp2, hybrid": Case(FAMILY_LAYOUTS["cp2"], family=HYBRID),
    "tp2-ep2, mamba": Case(FAMILY_LAYOUTS["tp2-ep2"], "dora", family=MAMBA),
    "cp2, mamba": Case(FAMILY_LAYOUTS["cp2"], family=MAMBA),
    "tp2-ep2, omni": Case(FAMILY_LAYOUTS["tp2-ep2"], "tower, rslora", family=OMNI),
    "ep2, experts": Case(FAMILY_LAYOUTS["ep2"], family=MOE),
    "tp2-ep2, experts": Case(FAMILY_LAYOUTS["tp2-ep2"], family=MOE),
    "tp2-captured": Case(LAYOUTS["tp2-captured"]),
    "tp2-sp-captured, dora": Case(LAYOUTS["tp2-sp-captured"], "dora"),
    "dp2-captured, some": Case(LAYOUTS["dp2-captured"], "some"),
    "tp2-cp2-pp2, dora": Case(LAYOUTS["tp2-cp2-pp2"], "dora"),
    "tp2-sp, begun": Case(LAYOUTS["tp2-sp"], begun=True),
    "pp2, begun": Case(LAYOUTS["pp2"], begun=True),
    "dp2, tower begun": Case(LAYOUTS["dp2"], "tower", begun=True),
}

EXPORTED = ("tp2-sp, tower", "pp2, adamw")
SAVED = ("dp2, adamw",)
GOES_ON_FROM = {"tp2, adamw": "dp2, adamw", "pp2, adamw": "hf"}
"""What `hf` saved is the test's own."""


def make_megatron(layout: Layout, ranks: Ranks, chosen: TrainingPolicy, folder: Path) -> Any:
    """A float32 engine."""
    model = ModelSection(
        path=str(folder),
        backend="mcore",
        dtype="float32",
        attention="auto" if layout.captured else "segments",
        activation_checkpointing=layout.recompute,
    )
    parts = (model, layout.sizes, Encoder(folder), ranks, chosen)
    return engine_of(*parts, captures=layout.captured)


def write_begun(folder: Path) -> None:
    """Adapters of each policy that have learnt something, and what was trained in full beside."""
    for name in {case.policy for case in CASES.values() if case.begun}:
        engine = make_engine(TINY_MODEL, Encoder(TINY_MODEL), policy=POLICIES[name])
        draw = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for _, parameter in engine.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=draw))
        engine.export_adapter(folder / f"begun-{name}", base=str(TINY_MODEL))


def begin(engine: Any, case: Case, folder: Path) -> None:
    """Go on with what `write_begun` wrote, where the case says so."""
    if case.begun:
        encoder = Encoder(case.model(folder))
        stored = open_adapter(folder / f"begun-{case.policy}", engine.policy, encoder)
        go_on_with(engine, stored, engine.ranks)


def faster(engine: Any, optimizer: str) -> Any:
    """A stepper whose SGD moves B, which begins as zero, so far that A has gradients."""
    stepper = stepper_with(engine, optimizer)
    if optimizer == "sgd":
        stepper.schedule = lambda step: SGD_LR
    return stepper


def bare(name: str) -> str:
    """A name without what peft puts into those of adapted layers."""
    return name.replace(BASE, ".")


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """All parameters of the hf engine."""
    return {bare(name): p.detach().clone() for name, p in engine.vlm.model.named_parameters()}


def reference(case: Case, folder: Path) -> tuple[Trained, dict[str, torch.Tensor], Any]:
    """The hf engine in one process, where it began, and the engine."""
    model = case.model(folder)
    engine = make_engine(model, Encoder(model), policy=POLICIES[case.policy])
    begin(engine, case, folder)
    start = state_of(engine)
    stepper = faster(engine, case.optimizer)
    rows = train(stepper, LAYOUTS["one"], STEPS - 1, model)
    if case.optimizer == "adamw":
        save_engine(folder / "hf-saved", STEPS - 1, engine, keep=1)
    rows += train(stepper, LAYOUTS["one"], 1, model)
    return Trained(rows, state_of(engine)), start, engine


def save_or_go_on(job: str, engine: Any, case: Case, folder: Path) -> list[list[float]]:
    """(loss, gradient norm) by step, of all steps in one layout or in two."""
    model, source = case.model(folder), GOES_ON_FROM.get(job)
    stepper, ranks = faster(engine, case.optimizer), engine.ranks
    if source is not None:
        load_checkpoint(step_folder(folder / f"{source}-saved", STEPS - 1), engine, ranks)
        rows = ranks.on_main(lambda: Trained.load(folder / source).rows[:-1])
        return rows + train(stepper, case.layout, 1, model)
    rows = train(stepper, case.layout, STEPS - 1, model)
    if job in SAVED:
        save_engine(folder / f"{job}-saved", STEPS - 1, engine, keep=1, ranks=ranks)
    return rows + train(stepper, case.layout, 1, model)


def run_case(job: str, case: Case, ranks: Ranks, folder: Path) -> tuple[Trained, bool]:
    """In one layout; whether all copies of a weight have the same bits."""
    engine = make_megatron(case.layout, ranks, POLICIES[case.policy], case.model(folder))
    begin(engine, case, folder)
    rows = save_or_go_on(job, engine, case, folder)
    if job in EXPORTED:
        engine.export(folder / f"{job}-merged", processor_from=TINY_MODEL, dtype=torch.float32)
        engine.export_adapter(folder / f"{job}-adapter", base=str(TINY_MODEL))
    if case.layout.captured:
        graph = engine.model.graph
        assert [graph.captures, graph.replays] == [1, STEPS * len(BINS) // case.layout.dp]
    held = sum(p.numel() for p in engine.model.parameters() if p.requires_grad)
    everywhere = ranks.gather_objects(held)
    (folder / f"{job}-held.txt").write_text(str(max(everywhere)))
    weights, same = whole_weights(engine)
    return Trained(rows, weights), all(ranks.gather_objects(same))


class Unmarked(LinearAdapter):
    """Without the mark by which Megatron adds up gradients over the TP ranks."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for parameter in self.parameters():
            vars(parameter)["sequence_parallel"] = False


class SummedTwice(LinearAdapter):
    """B's gradient of a row-parallel layer, which is whole on each rank, is added up over them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.by_row:
            self.b.register_hook(self._summed)

    def _summed(self, gradient: torch.Tensor) -> torch.Tensor:
        summed = gradient.clone()
        dist.all_reduce(summed, group=self.group)
        return summed


def drawn_alone(skeleton: Any, paths: Any, policy: TrainingPolicy, targets: Any) -> Any:
    """Each rank draws by a seed of its own."""
    return drawn(skeleton, paths, replace(policy, seed=dist.get_rank()), targets)


drawn = beside._drawn


def not_crossed(low: torch.Tensor, *, group: Any) -> torch.Tensor:
    """Nothing is exchanged."""
    return low


CONTROLS: dict[str, tuple[str, Any, str, Any]] = {
    "A is another on each rank": ("tp2", beside, "_drawn", drawn_alone),
    "gradients of A without a sum": (
        "tp2", adapters, "copy_to_tensor_model_parallel_region", not_crossed,
    ),
    "A x without a sum": (
        "tp2", adapters, "reduce_from_tensor_model_parallel_region", not_crossed,
    ),
    "gradients of B summed twice": ("tp2", adapters, "LinearAdapter", SummedTwice),
    "gradients of own tokens": ("tp2-sp", adapters, "LinearAdapter", Unmarked),
    "gradients of own tokens, omni": ("tp2-ep2, omni", adapters, "LinearAdapter", Unmarked),
    "lengths of own columns": (
        "tp2, dora", adapters, "dist", SimpleNamespace(all_reduce=lambda *_, **__: None),
    ),
}  # fmt: skip
"""The case that is broken, and how: what is put in the place of what."""


def main(folder: Path, jobs: list[str]) -> None:
    """One job after another."""
    for job in jobs:
        name, *broken = CONTROLS.get(job, (job,))
        case = CASES[name]
        with one_layout(case.layout) as ranks:
            with patch.object(*broken) if broken else nullcontext():
                trained, same = run_case(job, case, ranks, folder)
            assert same or broken, job
            if ranks.is_main:
                trained.save(folder / job)
    stop_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
