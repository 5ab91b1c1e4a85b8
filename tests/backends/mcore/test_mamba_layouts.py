"""Nemotron-H (Mamba-2, attention without positions, MLPs and experts, a layer each) takes the
optimizer steps of the hf engine in one process, in every layout of Megatron's; known ways to lose a
state, or to let it run on, are found.

As `test_hybrid_layouts.py` has it for GatedDeltaNet. At TP 2 a rank has one group of heads, so at
CP 2 beside it two ranks run parts of a group.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from backends.mcore import hybrid_layouts as worker
from backends.mcore.launches import FamilyLaunches
from safetensors.torch import load_file, save_file
from support import layouts
from support.engines import make_engine, make_stepper
from support.families import TINY, write_tiny
from support.stock import load_stock

from vlmpack.encode import Encoder
from vlmpack.training.checkpoint import load_checkpoint, step_folder

pytestmark = pytest.mark.slow

NAME, DENSE = "nemotron_h", "dense"
KINDS = {
    NAME: ["linear_attention", "moe", "full_attention", "linear_attention", "mlp", "moe"],
    DENSE: ["linear_attention", "mlp", "full_attention", "linear_attention"],
}
"""Layers that two stages share out; without experts TP goes without sequence parallelism."""

BIAS = "e_score_correction_bias"
SAVE = f"save:{NAME}:{worker.SAVED}"
CONTROLS = [name for name in worker.CONTROLS if name != "norm without a sum"]
"""No norm of Mamba-2's is copied over TP ranks."""
IN_CI = ("state lost between chunks", "heads of the first rank")

LAUNCHES = {
    "two": [
        f"train:{NAME}:tp2-ep2",
        f"twin:{NAME}:cp2",
        *(f"{name}:{NAME}:cp2" for name in IN_CI),
    ],
    "more": [
        *(f"{name}:{NAME}:cp2" for name in CONTROLS if name not in IN_CI),
        f"train:{DENSE}:tp2-whole",
        f"export:{NAME}:tp2-ep2",
        SAVE,
        f"resume:{NAME}:cp2",
        *(
            f"train:{NAME}:{name}"
            for name in ("cp2", "pp2", "tp2", "tp2-selective", "dp2", "ep2", "cp2-ep2")
        ),
    ],
    "four": [f"train:{NAME}:{name}" for name in ("tp2-cp2", "tp2-pp2-sp", "cp2-pp2")],
}
"""Jobs that share processes."""

MARKS = {"two": (), "more": pytest.mark.soak, "four": pytest.mark.soak}
LAUNCH_OF = {job: launch for launch, jobs in LAUNCHES.items() for job in jobs}
TRAINED = [
    pytest.param(job, marks=MARKS[launch])
    for job, launch in LAUNCH_OF.items()
    if job.startswith("train:")
]


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """Of both models; the bias of experts decides."""
    folder = tmp_path_factory.mktemp("mamba")
    for name, kinds in KINDS.items():
        made = TINY["nemotron_h"].config()
        made.layers_block_type, made.routed_scaling_factor = kinds, 1.5
        (folder / name).mkdir()
        write_tiny(replace(TINY["nemotron_h"], config=lambda made=made: made), folder / name)
    stored = folder / NAME / "model.safetensors"
    weights = load_file(str(stored))
    biases = [name for name in weights if name.endswith(BIAS)]
    assert len(biases) == 2
    for name in biases:
        weights[name] = torch.tensor([0.31, -0.27, 0.13, -0.2])
    save_file(weights, str(stored), metadata={"format": "pt"})
    return FamilyLaunches(worker.__file__, folder, LAUNCHES, worker.LAYOUTS)


@pytest.mark.parametrize("optimizer", layouts.OPTIMIZERS)
@pytest.mark.parametrize("job", TRAINED)
def test_five_steps_are_those_of_one_process(launches, job, optimizer):
    family = job.split(":")[1]
    errors = layouts.worst_errors(
        launches.trained(job, optimizer),
        launches.expected(family, optimizer),
        launches.start(family),
    )
    print(f"\n{job} {optimizer}: " + "  ".join(f"{n} {e:.1e}" for n, e in errors.items()))
    assert layouts.beyond_tolerance(errors) == {}


@pytest.mark.parametrize("job", TRAINED)
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
    reference, begin = launches.expected(NAME, "sgd"), launches.start(NAME)
    losses = [loss for loss, _ in reference.rows]
    assert losses == sorted(losses, reverse=True)
    moved = {
        name: layouts.relative_l2(reference.weights[name], value) for name, value in begin.items()
    }
    assert min(moved.values()) > 1e-6, min(moved, key=moved.get)
    assert sorted(moved.values())[len(moved) // 2] > 10 * layouts.TOLERANCES["weights"]
    ends = ("in_proj.weight", "conv1d.weight", "conv1d.bias", "dt_bias", "A_log", ".D")
    assert all(sum(name.endswith(end) for name in begin) == 2 for end in ends)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in IN_CI else pytest.mark.soak) for n in CONTROLS]
)
def test_a_fault_is_found(launches, name):
    """Its unbroken twin, one step with the same layout, is not."""
    reference, begin = launches.expected(NAME, "sgd", 1), launches.start(NAME)
    twin = layouts.worst_errors(launches.trained(f"twin:{NAME}:cp2", "sgd"), reference, begin)
    assert layouts.beyond_tolerance(twin) == {}
    errors = layouts.worst_errors(launches.trained(f"{name}:{NAME}:cp2", "sgd"), reference, begin)
    print(f"\n{name}: " + "  ".join(f"{n} {e:.1e}" for n, e in errors.items()))
    assert errors["updates"] > 10 * layouts.TOLERANCES["updates"]
    assert errors["loss"] > 5 * layouts.TOLERANCES["loss"]


@pytest.fixture(scope="module")
def unbroken(launches):
    """Rows after the checkpoint."""
    found = json.loads(launches.done(SAVE).with_suffix(".json").read_text())
    assert abs(found[-1][0] - found[0][0]) > 1e-3 * found[0][0], "nothing moved"
    return found


@pytest.mark.soak
def test_a_run_goes_on_in_another_layout(launches, unbroken):
    found = json.loads(launches.done(f"resume:{NAME}:cp2").with_suffix(".json").read_text())
    for ours, theirs in zip(found, unbroken, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.soak
def test_a_run_goes_on_with_the_other_engine(launches, unbroken):
    saved = step_folder(launches.done(SAVE), worker.STEPS_BEFORE)
    model = launches.folder / NAME
    engine = make_engine(model, Encoder(model))
    load_checkpoint(saved, engine, engine.ranks)
    found = layouts.train(make_stepper(engine), layouts.LAYOUTS["one"], worker.STEPS_AFTER, model)
    for ours, theirs in zip(found, unbroken, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.soak
def test_an_export_has_the_bits_of_the_original(launches):
    """Those of the files, the bias that no step changes among them."""
    exported, original = launches.done(f"export:{NAME}:tp2-ep2"), launches.folder / NAME
    ours, theirs = (load_file(str(path / "model.safetensors")) for path in (exported, original))
    assert ours.keys() == theirs.keys()
    assert sum(name.endswith(BIAS) for name in theirs) == 2
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    stock = load_stock(exported).state_dict()
    for name, value in load_stock(original).state_dict().items():
        assert torch.equal(stock[name], value), name
