"""Models with layers that carry state take the optimizer steps of the hf engine in one process, in
every layout of Megatron's; known ways to lose a state, or to let it run on, are found.

Same weights, same bins, float32, as `test_layouts.py` has it for attention alone.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from backends.mcore import hybrid_layouts as worker
from backends.mcore.launches import FamilyLaunches, write_families
from support import layouts
from support.engines import make_engine, make_stepper
from support.families import TINY, write_tiny
from support.stock import load_stock

from vlmpack.encode import Encoder
from vlmpack.training.checkpoint import load_checkpoint, step_folder

pytestmark = pytest.mark.slow

CONTROLS = [name for name in worker.CONTROLS if name != "no bias"]
"""Of layers of GatedDeltaNet."""
IN_CI = ("state lost between chunks", "taps run on")

VLM, TEXT, MOE, WIDE = "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "wide"
"""`wide` has as many heads as TP 2 x CP 2 share out."""

SAVE = f"save:{VLM}:{worker.SAVED}"

LAUNCHES = {
    "two": [
        f"train:{VLM}:cp2",
        f"train:{VLM}:tp2",
        f"train:{MOE}:cp2-ep2",
        f"twin:{VLM}:cp2",
        *(f"{name}:{VLM}:cp2" for name in IN_CI),
    ],
    "more": [
        *(f"{name}:{VLM}:cp2" for name in CONTROLS if name not in (*IN_CI, "norm without a sum")),
        f"export:{MOE}:cp2-ep2",
        SAVE,
        f"resume:{VLM}:cp2",
        f"export:{VLM}:tp2",
        f"twin:{VLM}:tp2-whole",
        f"norm without a sum:{VLM}:tp2-whole",
        *(f"train:{VLM}:{name}" for name in ("pp2", "dp2", "tp2-selective", "tp2-whole")),
        *(f"train:{TEXT}:{name}" for name in ("tp2", "pp2", "dp2", "cp2")),
        *(f"train:{MOE}:{name}" for name in ("tp2-ep2", "ep2", "pp2")),
        "train:qwen3_5_moe_text:cp2-ep2",
    ],
    "four": [f"train:{WIDE}:{name}" for name in ("tp2-cp2", "tp2-pp2", "cp2-pp2")],
}
"""Jobs that share processes."""

MARKS = {"two": (), "more": pytest.mark.soak, "four": pytest.mark.soak}
LAUNCH_OF = {job: launch for launch, jobs in LAUNCHES.items() for job in jobs}


def jobs_of(kind):
    """With the marks of their launches."""
    return [
        pytest.param(job, marks=MARKS[launch])
        for job, launch in LAUNCH_OF.items()
        if job.split(":")[0] == kind
    ]


def wide_folder(folder):
    """As the tiny model, with twice the heads that carry state."""
    made = TINY[VLM].config()
    made.text_config.linear_num_key_heads = 4
    made.text_config.linear_num_value_heads = 8
    folder.mkdir()
    write_tiny(replace(TINY[VLM], config=lambda: made), folder)


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrids")
    write_families(folder, (VLM, TEXT, MOE, "qwen3_5_moe_text"))
    wide_folder(folder / WIDE)
    return FamilyLaunches(worker.__file__, folder, LAUNCHES, worker.LAYOUTS)


@pytest.mark.parametrize("optimizer", layouts.OPTIMIZERS)
@pytest.mark.parametrize("job", jobs_of("train"))
def test_five_steps_are_those_of_one_process(launches, job, optimizer):
    family = job.split(":")[1]
    errors = layouts.worst_errors(
        launches.trained(job, optimizer),
        launches.expected(family, optimizer),
        launches.start(family),
    )
    print(f"\n{job} {optimizer}: " + "  ".join(f"{n} {e:.1e}" for n, e in errors.items()))
    assert layouts.beyond_tolerance(errors) == {}


@pytest.mark.parametrize("job", jobs_of("train"))
def test_weights_are_read_bit_by_bit_and_copies_agree(launches, job):
    """The engine's whole tensors before any step are the parameters that transformers loads."""
    facts = json.loads(launches.done(job).with_suffix(".json").read_text())
    assert len(facts) == worker.LAYOUTS[job.split(":")[2]].processes
    for fact in facts:
        assert fact["changed"] == []
        assert fact["copies agree, adamw"]
        assert fact["copies agree, sgd"]


def test_every_weight_takes_part(launches):
    """What the comparison would be worth without; the bound on updates is far below this."""
    begin, reference = launches.start(VLM), launches.expected(VLM, "sgd")
    losses = [loss for loss, _ in reference.rows]
    assert losses == sorted(losses, reverse=True)
    moved = {
        name: layouts.relative_l2(reference.weights[name], value) for name, value in begin.items()
    }
    # Norms of the tower move least: by far more than the rounding that updates are compared beyond.
    assert min(moved.values()) > 1e-6
    assert sorted(moved.values())[len(moved) // 2] > 10 * layouts.TOLERANCES["weights"]
    assert sum(".linear_attn." in name for name in begin) == 3 * 9
    assert sum(".self_attn.q_norm." in name for name in begin) == 1


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in IN_CI else pytest.mark.soak) for n in CONTROLS]
)
def test_a_lost_state_is_found(launches, name):
    """Its unbroken twin, one step with the same layout, is not."""
    layout = "tp2-whole" if name == "norm without a sum" else "cp2"
    reference, begin = launches.expected(VLM, "sgd", 1), launches.start(VLM)
    twin = layouts.worst_errors(launches.trained(f"twin:{VLM}:{layout}", "sgd"), reference, begin)
    assert layouts.beyond_tolerance(twin) == {}
    errors = layouts.worst_errors(
        launches.trained(f"{name}:{VLM}:{layout}", "sgd"), reference, begin
    )
    print(f"\n{name}: " + "  ".join(f"{n} {e:.1e}" for n, e in errors.items()))
    assert errors["updates"] > 10 * layouts.TOLERANCES["updates"]
    if name != "norm without a sum":
        assert errors["loss"] > 10 * layouts.TOLERANCES["loss"]


@pytest.fixture(scope="module")
def unbroken(launches):
    """Rows after the checkpoint."""
    found = json.loads(launches.done(SAVE).with_suffix(".json").read_text())
    assert abs(found[-1][0] - found[0][0]) > 1e-3 * found[0][0], "nothing moved"
    return found


@pytest.mark.soak
def test_a_run_goes_on_in_another_layout(launches, unbroken):
    found = json.loads(launches.done(f"resume:{VLM}:cp2").with_suffix(".json").read_text())
    for ours, theirs in zip(found, unbroken, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.soak
def test_a_run_goes_on_with_the_other_engine(launches, unbroken):
    saved = step_folder(launches.done(SAVE), worker.STEPS_BEFORE)
    engine = make_engine(launches.folder / VLM, Encoder(launches.folder / VLM))
    load_checkpoint(saved, engine, engine.ranks)
    found = layouts.train(
        make_stepper(engine), layouts.LAYOUTS["one"], worker.STEPS_AFTER, launches.folder / VLM
    )
    for ours, theirs in zip(found, unbroken, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("job", jobs_of("export"))
def test_an_export_has_the_bits_of_the_original(launches, job):
    exported = dict(load_stock(launches.done(job)).state_dict())
    original = load_stock(launches.folder / job.split(":")[1]).state_dict()
    assert exported.keys() == original.keys()
    for name, value in original.items():
        assert torch.equal(exported[name], value), name
