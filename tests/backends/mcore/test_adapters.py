"""Adapters beside Megatron's layers: every layout takes the optimizer steps of the hf engine with
the same recipe in one process, from the same first weights; known ways to be wrong are found.

Run in ranks: adapters on the Megatron engine, in parallel layouts.

    torchrun --nproc-per-node N test_adapters.py FOLDER JOB [JOB ...]

A job is a name of `CASES` or `CONTROLS`. Writes FOLDER/<job>.json and .safetensors, as
`support.layouts.Trained` does: all parameters under the names of the hf engine's, but for the
`.base_layer` that peft puts into those of adapted layers. Those of `EXPORTED` write what they
export beside it; those of `SAVED` a checkpoint before their last step, from which those of
`GOES_ON_FROM` take it. Those that are `begun` go on with the adapters in FOLDER/begun-<policy>.
FOLDER/<job>-held.txt has the trained elements of the fullest rank.
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from backends.mcore.family_layouts import FAMILY_LAYOUTS
from backends.mcore.launches import once, write_families
from safetensors.torch import load_file
from support import layouts
from support.checkpoints import save_engine
from support.engines import engine_of, make_engine, make_stepper, policy
from support.forked import check_ranks
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
from support.plans import mode_of
from support.shards import TINY_MODEL

from vlmpack.backends.hf.frozen import BASE
from vlmpack.backends.mcore import adapters, model_adapters
from vlmpack.backends.mcore.adapters import LinearAdapter
from vlmpack.backends.mcore.weights.base import split
from vlmpack.backends.policy import TrainingPolicy, is_adapter
from vlmpack.build.engine import go_on_with, open_adapter
from vlmpack.distributed import Ranks, start_process_group, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.forecast.memory import memory_figures
from vlmpack.forecast.parameters import read_sizes
from vlmpack.forecast.trained import trained_sizes
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
    "patterns": policy(
        *("frozen", "frozen", "lora"),
        rank_pattern={"o_proj": 2, "layers.1.mlp.gate_proj": 3, "layers.1.mlp.up_proj": 3},
        alpha_pattern={"layers.0.mlp.down_proj": 20.0},
    ),
    "experts": policy(
        *("frozen", "frozen", "lora"), rank=3, alpha=24.0, targets=("attention", "experts")
    ),
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
    "one, patterns": Case(LAYOUTS["one"], "patterns", begun=True),
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
    "tp2, patterns": Case(LAYOUTS["tp2"], "patterns"),
    "tp2-sp, hybrid": Case(FAMILY_LAYOUTS["tp2"], "dora", family=HYBRID),
    "cp2, hybrid": Case(FAMILY_LAYOUTS["cp2"], family=HYBRID),
    "tp2-ep2, mamba": Case(FAMILY_LAYOUTS["tp2-ep2"], "dora", family=MAMBA),
    "cp2, mamba": Case(FAMILY_LAYOUTS["cp2"], family=MAMBA),
    "tp2-ep2, omni": Case(FAMILY_LAYOUTS["tp2-ep2"], "tower, rslora", family=OMNI),
    "ep2, experts": Case(FAMILY_LAYOUTS["ep2"], family=MOE),
    "tp2-ep2, experts": Case(FAMILY_LAYOUTS["tp2-ep2"], family=MOE),
    "one, on experts": Case(LAYOUTS["one"], "experts", family=MOE),
    "ep2, on experts": Case(FAMILY_LAYOUTS["ep2"], "experts", family=MOE),
    "tp2, on experts": Case(FAMILY_LAYOUTS["tp2"], "experts", family=MOE),
    "tp2-ep2, on experts": Case(FAMILY_LAYOUTS["tp2-ep2"], "experts", family=MOE),
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
    return name if is_adapter(name) else name.replace(BASE[1:], "")


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


drawn = model_adapters._drawn


def not_crossed(low: torch.Tensor, *, group: Any) -> torch.Tensor:
    """Nothing is exchanged."""
    return low


class OfOthers(adapters.ExpertAdapter):
    """Each expert has the A of its neighbour, and columns of B that lie beside each other."""

    def pieces(self) -> dict[str, list[Any]]:
        pieces, experts, number = super().pieces(), self.box.shape[0], self.box.start[0]
        (a,), own = pieces["a"], (number + 1) % experts * self.rank
        rows = split(a.box.name, a.box.shape, 0, own, own + self.rank)
        columns = [
            replace(piece, box=split(piece.box.name, piece.box.shape, 1, at, at + 1))
            for at, piece in enumerate(pieces["b"], number * self.rank)
        ]
        return {"a": [replace(a, box=rows)], "b": columns}


CONTROLS: dict[str, tuple[str, Any, str, Any]] = {
    "A is another on each rank": ("tp2", model_adapters, "_drawn", drawn_alone),
    "gradients of A without a sum": (
        "tp2", adapters, "copy_to_tensor_model_parallel_region", not_crossed,
    ),
    "A x without a sum": (
        "tp2", adapters, "reduce_from_tensor_model_parallel_region", not_crossed,
    ),
    "gradients of B summed twice": ("tp2", adapters, "LinearAdapter", SummedTwice),
    "gradients of own tokens": ("tp2-sp", adapters, "LinearAdapter", Unmarked),
    "gradients of own tokens, omni": ("tp2-ep2, omni", adapters, "LinearAdapter", Unmarked),
    "another order of experts": ("ep2, on experts", adapters, "ExpertAdapter", OfOthers),
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


pytestmark = pytest.mark.slow

SLOW = {
    "one, some",
    "one, on experts",
    "ep2, on experts",
    "tp2, on experts",
    "another order of experts",
    "cp2",
    "pp2, adamw",
    "dp2, adamw",
    "tp2, adamw",
    "gradients of B summed twice",
    "tp2-sp, begun",
}
"""In two processes but for the first; the others are soak tests."""


def launch_of(job):
    """Jobs with the same number of processes and the same mark share a launch."""
    case = CASES[CONTROLS[job][0] if job in CONTROLS else job]
    return case.layout.processes, job in SLOW


def marked(jobs):
    """Each with the mark of its launch."""
    return [pytest.param(job, marks=() if job in SLOW else pytest.mark.soak) for job in jobs]


ALONE = [name for name in CASES if launch_of(name)[0] == 1]
TOGETHER = [name for name in CASES if name not in ALONE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    write_families(folder, (MOE, HYBRID, MAMBA, OMNI))
    write_begun(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    """The hf engine's steps, where it began, and the engine, by case."""

    @cache
    def steps(policy, optimizer, family, begun):
        case = Case(layouts.LAYOUTS["one"], policy, optimizer, family, begun)
        found = reference(case, folder)
        if optimizer == "adamw":
            found[0].save(folder / "hf")
        return found

    return lambda case: steps(case.policy, case.optimizer, case.family, case.begun)


@pytest.fixture(scope="module")
def found(folder, expected):
    """Runs all jobs of one launch at once, when the first of them is asked for."""
    expected(CASES["pp2, adamw"])  # which goes on from the hf engine's checkpoint

    @once
    def launch(processes, slow):
        jobs = [name for name in (*CASES, *CONTROLS) if launch_of(name) == (processes, slow)]
        jobs.sort(key=lambda name: name in GOES_ON_FROM)
        check_ranks([__file__, folder, *jobs], processes)

    def load(job):
        launch(*launch_of(job))
        return Trained.load(folder / job)

    return load


def errors_of(found, expected, case):
    """Relative. AdamW's first steps are nearly the gradient's sign, that of rounding too: a weight
    that begins as zero is an update and nothing else, and has the bound of updates."""
    reference, start, _ = expected
    errors = layouts.worst_errors(found, reference, start)
    if case.optimizer == "adamw":
        zero = {name for name, value in start.items() if not value.any()}
        assert zero and all(".lora_B." in name for name in zero)
        rest = start.keys() - zero
        held = [{n: each.weights[n] for n in rest} for each in (found, reference)]
        ours, theirs = (Trained(found.rows, weights) for weights in held)
        errors["weights"] = layouts.worst_errors(ours, theirs, {n: start[n] for n in rest})[
            "weights"
        ]
    return errors


def assert_equal(job, trained, expected):
    case = CASES[job]
    assert len(trained.rows) == STEPS
    errors = errors_of(trained, expected(case), case)
    print(f"\n{job:20} " + "  ".join(f"{what} {error:.1e}" for what, error in errors.items()))
    assert layouts.beyond_tolerance(errors) == {}


@pytest.mark.parametrize("job", marked(ALONE))
def test_one_process_takes_the_steps_of_the_hf_engine(folder, expected, job):
    with layouts.one_layout(CASES[job].layout) as ranks:
        trained, same = run_case(job, CASES[job], ranks, folder)
    assert same
    assert_equal(job, trained, expected)


@pytest.mark.parametrize("job", marked(TOGETHER))
def test_a_layout_takes_the_steps_of_the_hf_engine(found, expected, job):
    """Some of them go on, after two steps, from a checkpoint of the hf engine or of another
    layout."""
    assert_equal(job, found(job), expected)


@pytest.mark.parametrize("job", marked(CONTROLS))
def test_a_broken_adapter_is_found(found, expected, job):
    case = CASES[CONTROLS[job][0]]
    errors = errors_of(found(job), expected(case), case)
    print(f"\n{job}: " + "  ".join(f"{what} {error:.1e}" for what, error in errors.items()))
    assert layouts.beyond_tolerance(errors).keys() >= {"gradient norm", "updates"}
    assert errors["gradient norm"] >= 10 * layouts.TOLERANCES["gradient norm"]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=pytest.mark.soak if case.family == OMNI else ())
        for name, case in {case.policy: (name, case) for name, case in CASES.items()}.values()
    ],
)
def test_every_adapter_takes_part_and_the_base_stays(expected, case):
    reference, start, engine = expected(case)
    losses = [loss for loss, _ in reference.rows]
    assert losses == sorted(losses, reverse=True) and losses[0] - losses[-1] > 0.1
    trained = {bare(name) for name, _ in engine.parameters()}
    moved = {n for n, value in reference.weights.items() if not torch.equal(value, start[n])}
    assert moved == trained
    assert sum(".lora_A." in name for name in trained) >= 12
    assert any(".base_layer." in name for name, _ in engine.vlm.model.named_parameters())


def test_adapters_that_are_gone_on_with_are_others_than_new_ones(expected):
    """Guard: a start that was ignored on both engines would pass."""
    for name in ("tp2-sp, begun", "dp2, tower begun"):
        begun = CASES[name]
        (reference, start, _), (fresh, new, _) = (
            expected(begun),
            expected(replace(begun, begun=False)),
        )
        assert all(value.any() for value in start.values())
        learnt = {n for n, value in start.items() if not torch.equal(value, new[n])}
        assert learnt == {n for n, v in reference.weights.items() if not torch.equal(v, start[n])}
        assert abs(reference.rows[0][0] - fresh.rows[0][0]) > 1e-2


def test_the_hf_engine_goes_on_from_a_layouts_checkpoint(folder, found, expected):
    case = CASES["dp2, adamw"]
    saved = found("dp2, adamw")
    _, _, other = expected(case)
    load_checkpoint(step_folder(folder / "dp2, adamw-saved", STEPS - 1), other, other.ranks)
    stepper = faster(other, case.optimizer)
    [row] = layouts.train(stepper, layouts.LAYOUTS["one"], 1)
    assert row == pytest.approx(saved.rows[-1], rel=1e-5)
    assert abs(saved.rows[-1][0] - saved.rows[0][0]) > 1e-3 * saved.rows[0][0], "nothing moved"


@pytest.mark.parametrize("job", marked(EXPORTED))
def test_the_adapter_folder_is_that_of_the_hf_engine(folder, found, expected, tmp_path, job):
    """The same files, names and settings, with what this layout has trained."""
    weights = found(job).weights
    expected(CASES[job])[2].export_adapter(tmp_path, base=str(TINY_MODEL))
    ours, theirs = (
        load_file(str(place / "adapter_model.safetensors"))
        for place in (folder / f"{job}-adapter", tmp_path)
    )
    assert {name: value.shape for name, value in ours.items()} == {
        name: value.shape for name, value in theirs.items()
    }
    configs = [
        json.loads((place / "adapter_config.json").read_text())
        for place in (folder / f"{job}-adapter", tmp_path)
    ]
    assert configs[0] == configs[1]
    adapters = [name for name in weights if is_adapter(name)]
    for name in adapters:
        stored = "base_model.model." + name.replace(".default.weight", ".weight")
        stored = stored.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
        assert torch.equal(ours[stored], weights[name]), name
    assert len(adapters) >= 2 * 28


@pytest.mark.parametrize("job", marked(EXPORTED))
def test_peft_loads_the_adapters_into_the_merged_model(folder, found, job):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    weights = found(job).weights
    adapted_weights = {n.partition(".lora_")[0] + ".weight" for n in weights if is_adapter(n)}
    stock = AutoModelForImageTextToText.from_pretrained(str(TINY_MODEL), dtype=torch.float32)
    merged = AutoModelForImageTextToText.from_pretrained(
        str(folder / f"{job}-merged"), dtype=torch.float32
    ).state_dict()
    before = {name: value.clone() for name, value in stock.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an older name
        adapted = PeftModel.from_pretrained(stock, str(folder / f"{job}-adapter"))
    after = adapted.merge_and_unload().state_dict()
    assert after.keys() == merged.keys()
    moved = set()
    for name, value in after.items():
        assert torch.allclose(value, merged[name], rtol=1e-5, atol=1e-6), name
        if not torch.allclose(value, before[name], rtol=1e-5, atol=1e-6):
            moved.add(name)
    assert adapted_weights <= moved and len(adapted_weights) >= 28


@pytest.mark.parametrize(
    "job", marked(["tp2, adamw", "pp2, adamw", "tp2-sp, tower", "ep2, on experts"])
)
def test_the_plan_counts_what_the_fullest_rank_trains(folder, found, job):
    found(job)
    case = CASES[job]
    model = case.model(folder)
    sizes, encoder = read_sizes(model), Encoder(model)
    figures = memory_figures(
        ModelSection(path=str(model), backend="mcore", dtype="float32"),
        case.layout.sizes,
        sizes,
        mode_of(max_row_slots=512, max_row_patches=64),
        global_batch_size=4,
        world_size=case.layout.processes,
        trained=trained_sizes(POLICIES[case.policy], encoder),
    )
    assert figures.rank_trained == int((folder / f"{job}-held.txt").read_text())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dropout": 0.1}, "trainable.lora.dropout is 0.1"),
        ({"quantize": "nf4"}, "trainable.lora.quantize is nf4"),
        ({"targets": ("q_poj",)}, "ends in 'q_poj'"),
        ({"rank_pattern": {"q_proj": 2}}, "one rank and scale; found ranks q_proj 2, k_proj 4, v"),
    ],
)
def test_what_is_not_there_is_named(settings, message):
    with pytest.raises(CapabilityError, match=message):
        make_megatron(
            layouts.LAYOUTS["one"],
            start_process_group(),
            policy(language="lora", **settings),
            TINY_MODEL,
        )


def test_generation_has_the_adapters_inside():
    """And nothing of them beside; in bfloat16 DoRA's magnitudes stay float32, so that the model
    begins as the one without."""
    one = layouts.LAYOUTS["one"]
    chosen = POLICIES["dora"]
    model = ModelSection(
        path=str(TINY_MODEL), backend="mcore", dtype="bfloat16", attention="segments"
    )
    with layouts.one_layout(one) as ranks:
        engine = engine_of(model, one.sizes, Encoder(TINY_MODEL), ranks, chosen)
        dtypes = {
            name.rpartition(".")[2]: parameter.dtype
            for name, parameter in engine.model.named_parameters()
            if ".adapter." in name
        }
        half = torch.bfloat16
        assert dtypes == {"a": half, "b": half, "magnitude": torch.float32}
        linear = engine.model.gpt.decoder.layers[1].self_attention.linear_qkv
        scales = linear.adapter.magnitude / linear.adapter._norms(linear.weight)
        assert torch.allclose(scales, torch.ones(()), atol=1e-6)
        stepper = make_stepper(engine)
        stepper.schedule = lambda step: 0.01
        layouts.train(stepper, one, 2)
        whole = {name: value.clone() for name, value in engine.whole_tensors()}
        with engine.generation() as copy:
            found = dict(copy.state_dict())
    assert not any(is_adapter(name) for name in found)
    layer = "model.language_model.layers.1.self_attn.k_proj"
    a, b, magnitude = (
        whole[f"{layer}.lora_{kind}.default.weight"] for kind in ("A", "B", "magnitude_vector")
    )
    merged = whole[f"{layer}.weight"] + 8.0 / 4**0.5 * b @ a
    merged = merged * (magnitude / merged.norm(dim=1))[:, None]
    held = found[f"{layer}.weight"]
    assert held.dtype is half
    other = held != merged.to(half)
    assert other.float().mean() < 1e-3, "merged in float32, and rounded once"
    assert layouts.relative_l2(whole[f"{layer}.weight"], merged) > 1e-3, "nothing was learnt"
    unmoved = "model.language_model.embed_tokens.weight"
    assert torch.equal(found[unmoved], whole[unmoved])


def test_the_reference_is_not_taken_from_the_adapted_model():
    with layouts.one_layout(layouts.LAYOUTS["one"]) as ranks:
        chosen = POLICIES["dora"]
        engine = make_megatron(layouts.LAYOUTS["one"], ranks, chosen, TINY_MODEL)
    with pytest.raises(CapabilityError, match=r"adapters_off needs model\.backend: hf"):
        engine.adapters_off()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
