"""Adapters beside Megatron's layers: every layout takes the optimizer steps of the hf engine with
the same recipe in one process, from the same first weights; known ways to be wrong are found."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from support import beside_layers, layouts
from support.beside_layers import CASES, CONTROLS, HYBRID, MAMBA, MOE, OMNI, STEPS
from support.engines import engine_of, make_stepper, policy
from support.forked import check_ranks
from support.launches import once, write_families
from support.layouts import Trained
from support.plans import mode_of
from support.shards import TINY_MODEL

from vlmpack.backends.policy import is_adapter
from vlmpack.distributed import start_process_group
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.forecast.memory import memory_figures
from vlmpack.forecast.parameters import read_sizes
from vlmpack.forecast.trained import trained_sizes
from vlmpack.recipe.schema import ModelSection
from vlmpack.training.checkpoint import load_checkpoint, step_folder

pytestmark = pytest.mark.slow

SLOW = {
    "one, some",
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
    beside_layers.write_begun(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    """The hf engine's steps, where it began, and the engine, by case."""

    @cache
    def steps(policy, optimizer, family, begun):
        case = beside_layers.Case(layouts.LAYOUTS["one"], policy, optimizer, family, begun)
        found = beside_layers.reference(case, folder)
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
        jobs.sort(key=lambda name: name in beside_layers.GOES_ON_FROM)
        check_ranks([beside_layers.__file__, folder, *jobs], processes)

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
        trained, same = beside_layers.run_case(job, CASES[job], ranks, folder)
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
    trained = {beside_layers.bare(name) for name, _ in engine.parameters()}
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
    stepper = beside_layers.faster(other, case.optimizer)
    [row] = layouts.train(stepper, layouts.LAYOUTS["one"], 1)
    assert row == pytest.approx(saved.rows[-1], rel=1e-5)
    assert abs(saved.rows[-1][0] - saved.rows[0][0]) > 1e-3 * saved.rows[0][0], "nothing moved"


@pytest.mark.parametrize("job", marked(beside_layers.EXPORTED))
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


@pytest.mark.parametrize("job", marked(beside_layers.EXPORTED))
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


@pytest.mark.parametrize("job", marked(["tp2, adamw", "pp2, adamw", "tp2-sp, tower"]))
def test_the_plan_counts_what_the_fullest_rank_trains(folder, found, job):
    found(job)
    case = CASES[job]
    sizes, encoder = read_sizes(TINY_MODEL), Encoder(TINY_MODEL)
    figures = memory_figures(
        ModelSection(path=str(TINY_MODEL), backend="mcore", dtype="float32"),
        case.layout.sizes,
        sizes,
        mode_of(max_row_slots=512, max_row_patches=64),
        global_batch_size=4,
        world_size=case.layout.processes,
        trained=trained_sizes(beside_layers.POLICIES[case.policy], encoder),
    )
    assert figures.rank_trained == int((folder / f"{job}-held.txt").read_text())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dropout": 0.1}, "trainable.lora.dropout is 0.1"),
        ({"quantize": "nf4"}, "trainable.lora.quantize is nf4"),
        ({"targets": ("q_poj",)}, "ends in 'q_poj'"),
    ],
)
def test_what_is_not_there_is_named(settings, message):
    with pytest.raises(CapabilityError, match=message):
        beside_layers.make_megatron(
            layouts.LAYOUTS["one"],
            start_process_group(),
            policy(language="lora", **settings),
            TINY_MODEL,
        )


def test_generation_has_the_adapters_inside():
    """And nothing of them beside; in bfloat16 DoRA's magnitudes stay float32, so that the model
    begins as the one without."""
    one = layouts.LAYOUTS["one"]
    chosen = beside_layers.POLICIES["dora"]
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
        chosen = beside_layers.POLICIES["dora"]
        engine = beside_layers.make_megatron(layouts.LAYOUTS["one"], ranks, chosen, TINY_MODEL)
    with pytest.raises(CapabilityError, match=r"adapters_off needs model\.backend: hf"):
        engine.adapters_off()
