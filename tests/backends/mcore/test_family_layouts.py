"""Every family on the Megatron engine takes the optimizer steps of the hf engine in one process.

As `test_layouts.py` has it for Qwen2.5-VL: same weights, same bins, float32; here DeepStack, norms
of queries and keys, interleaved rotary sections, and experts with expert parallelism. CI has
experts shared out over two processes, and deep features that travel; `make soak` the other layouts.
"""

from __future__ import annotations

import json

import pytest
import torch
from backends.mcore import family_layouts as worker
from backends.mcore.launches import FamilyLaunches, write_families
from support import layouts
from support.engines import make_engine, make_stepper
from support.stock import load_stock

from vlmpack.encode import Encoder
from vlmpack.training.checkpoint import load_checkpoint, step_folder

FAMILIES = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "llama", "qwen2", "qwen3")
TEXT = ("llama", "qwen2", "qwen3")
MOE = "qwen3_vl_moe"
DEEP = ("qwen3_vl", MOE)

BY_FAMILY = {
    "qwen2_vl": ("one", "tp2", "cp2", "dp2"),  # three layers: no two stages
    "qwen3_vl": ("one", "tp2", "cp2", "pp2", "dp2"),
    MOE: ("one", "tp2", "cp2", "pp2", "dp2", "ep2", "tp2-ep2", "cp2-ep2"),
    "llama": ("tp2",),
    "qwen2": ("tp2",),
    "qwen3": ("cp2",),
}
AUX = ("ep2", "tp2", "cp2", "pp2")
"""Compared with one process: the hf engine has no auxiliary loss."""


TRAINED = [f"train:{family}:{name}" for family, names in BY_FAMILY.items() for name in names]
LAUNCHES = {
    "experts": [f"train:{MOE}:ep2", f"export:{MOE}:ep2"],
    "deep": ["travel:qwen3_vl:pp2", "behind:qwen3_vl:pp2"],
    "layouts": [
        f"save:{MOE}:ep2",
        f"train:{MOE}:cp2-ep2",
        "train:qwen3_vl:pp2",
        f"aux:{MOE}:ep2",
    ],
    "one": [f"train:{MOE}:one", f"aux:{MOE}:one", f"resume:{MOE}:one"],
    "losses, exports": [
        *(f"aux:{MOE}:{name}" for name in AUX if name != "ep2"),
        *(f"export:{family}:{BY_FAMILY[family][0]}" for family in TEXT),
    ],
    "pairs": [
        *(f"pairs:{MOE}:{name}" for name in ("ep2", "cp2-ep2", "tp2")),
        *(f"pairs:qwen3_vl:{name}" for name in ("cp2", "pp2")),
    ],
    "one more": [f"train:{family}:one" for family in ("qwen2_vl", "qwen3_vl")],
}
"""Jobs that share processes. The last one of `one` needs what `layouts` saves."""
LAUNCHED = {job for jobs in LAUNCHES.values() for job in jobs}
LAUNCHES["more layouts"] = [job for job in TRAINED if job not in LAUNCHED]
IN_CI = ("experts", "deep")
LAUNCH_OF = {job: launch for launch, jobs in LAUNCHES.items() for job in jobs}


def marked(job, *values):
    """A test of the run that its job's launch belongs to."""
    mark = pytest.mark.slow if LAUNCH_OF[job] in IN_CI else pytest.mark.soak
    return pytest.param(*values, marks=mark)


PAIRS = [
    marked(f"train:{family}:{name}", family, name)
    for family, names in BY_FAMILY.items()
    for name in names
]


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    write_families(folder, FAMILIES)
    jobs, after = LAUNCHES, {"one": "layouts"}
    return FamilyLaunches(worker.__file__, folder, jobs, worker.FAMILY_LAYOUTS, after)


def show(what, errors):
    print(f"\n{what}: " + "  ".join(f"{name} {error:.1e}" for name, error in errors.items()))


@pytest.mark.parametrize("optimizer", layouts.OPTIMIZERS)
@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_five_steps_are_those_of_one_process(launches, family, name, optimizer):
    found = launches.trained(f"train:{family}:{name}", optimizer)
    assert len(found.rows) == layouts.STEPS
    errors = layouts.worst_errors(
        found, launches.expected(family, optimizer), launches.start(family)
    )
    show(f"{family} {name} {optimizer}", errors)
    assert layouts.beyond_tolerance(errors) == {}


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_weights_are_read_bit_by_bit_and_copies_agree(launches, family, name):
    """The engine's whole tensors before any step are the parameters that transformers loads."""
    facts = json.loads(launches.done(f"train:{family}:{name}").with_suffix(".json").read_text())
    layout = worker.FAMILY_LAYOUTS[name]
    assert len(facts) == layout.processes
    total = sum(value.numel() for value in launches.start(family).values())
    for fact in facts:
        assert fact["changed"] == []
        assert fact["copies agree, adamw"]
        assert fact["copies agree, sgd"]
        alone = layout.tensor * layout.pipeline * layout.expert == 1
        assert (fact["elements"] == total) == alone
    routed, experts, matrices = 3, 4, 2
    held = [fact["experts"] for fact in facts]
    if family != MOE:
        assert set(held) == {0}
    elif layout.pipeline == 2:
        assert held == [1 * experts * matrices, 2 * experts * matrices]
    else:
        assert set(held) == {routed * experts // layout.expert * matrices}


@pytest.mark.cases(slow=MOE)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_takes_part(launches, family):
    """What the comparison would be worth without; the bound on updates is far below this."""
    begin = launches.start(family)
    for optimizer in layouts.OPTIMIZERS:
        reference = launches.expected(family, optimizer)
        assert reference.weights.keys() == begin.keys()
        losses = [loss for loss, _ in reference.rows]
        assert losses == sorted(losses, reverse=True)
        moved = {
            name: layouts.relative_l2(reference.weights[name], value)
            for name, value in begin.items()
        }
        assert min(moved.values()) > layouts.TOLERANCES["weights"], optimizer
        assert sorted(moved.values())[len(moved) // 2] > 10 * layouts.TOLERANCES["weights"]
    parts = {
        "deepstack_merger_list": 12 if family in DEEP else 0,
        "q_norm": 4 if family in (*DEEP, "qwen3") else 0,
        "q_proj.bias": 3 if family in ("qwen2", "qwen2_vl") else 0,
        "mlp.experts.": 6 if family == MOE else 0,
        "mlp.gate.weight": 3 if family == MOE else 0,
    }
    assert {part: sum(part in name for name in begin) for part in parts} == parts


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in TEXT])
def test_rows_have_no_image_one_and_several(launches, family):
    samples = layouts.samples(launches.folder / family)
    images = [
        sum(samples[index].media.num_images for index in bin_ if samples[index].media)
        for bin_ in layouts.BINS
    ]
    assert images[0] > 4
    assert images[1:] == [0, 1, 0]
    assert min(sample.length for sample in samples) == 3, "shorter than 2 * CP"
    assert all(sample.position_ids.shape[0] == 3 for sample in samples)


@pytest.mark.slow
def test_the_exported_experts_have_the_bits_of_the_original(launches):
    exported = dict(load_stock(launches.done(f"export:{MOE}:ep2")).state_dict())
    original = load_stock(launches.folder / MOE).state_dict()
    assert exported.keys() == original.keys()
    for name, value in original.items():
        assert torch.equal(exported[name], value), name


@pytest.mark.soak
@pytest.mark.parametrize("family", TEXT)
def test_a_language_model_exports_the_bits_it_was_read_from(launches, family):
    exported = load_stock(launches.done(f"export:{family}:{BY_FAMILY[family][0]}")).state_dict()
    original = load_stock(launches.folder / family).state_dict()
    assert exported.keys() == original.keys()
    assert ("lm_head.weight" in exported) and not any("visual" in name for name in exported)
    for name, value in original.items():
        assert torch.equal(exported[name], value), name


@pytest.mark.parametrize("name", [marked(f"aux:{MOE}:{name}", name) for name in AUX])
def test_the_auxiliary_loss_is_that_of_one_process(launches, name):
    found = launches.trained(f"aux:{MOE}:{name}", "sgd")
    one = launches.trained(f"aux:{MOE}:one", "sgd")
    errors = layouts.worst_errors(found, one, launches.start(MOE))
    show(f"auxiliary loss, {name}", errors)
    assert layouts.beyond_tolerance(errors) == {}
    reported, expected = ([router for _, _, router in each.rows] for each in (found, one))
    assert reported == pytest.approx(expected, rel=1e-5)
    assert max(expected) - min(expected) > 1e-4, "nothing to compare"
    without = launches.trained(f"train:{MOE}:one", "sgd")
    assert {len(row) for row in without.rows} == {2}
    off = layouts.beyond_tolerance(layouts.worst_errors(found, without, launches.start(MOE)))
    assert off.keys() == layouts.TOLERANCES.keys(), "it changed nothing"


@pytest.mark.slow
def test_deep_features_travel_with_their_micro_batch(launches):
    """Two stages with recomputation: several micro-batches are under way at a time. Features of the
    micro-batch before are found."""
    begin = launches.start("qwen3_vl")
    with worker.equal_rows():
        reference = layouts.train_reference("sgd", 1, launches.folder / "qwen3_vl")
    twin = layouts.worst_errors(launches.trained("travel:qwen3_vl:pp2", "sgd"), reference, begin)
    broken = layouts.worst_errors(launches.trained("behind:qwen3_vl:pp2", "sgd"), reference, begin)
    show("travelling", twin)
    show("behind", broken)
    assert layouts.beyond_tolerance(twin) == {}
    assert layouts.beyond_tolerance(broken).keys() == layouts.TOLERANCES.keys()


@pytest.fixture(scope="module")
def unbroken(launches):
    """Rows after the checkpoint that was written at EP 2 with sharded optimizers."""
    found = json.loads(launches.done(f"save:{MOE}:ep2").with_suffix(".json").read_text())
    assert len(found) == worker.STEPS_AFTER
    assert abs(found[-1][0] - found[0][0]) > 1e-3 * found[0][0], "nothing moved"
    return found


def assert_goes_on(found, unbroken):
    for ours, theirs in zip(found, unbroken, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.soak
def test_a_run_goes_on_in_one_process(launches, unbroken):
    found = json.loads(launches.done(f"resume:{MOE}:one").with_suffix(".json").read_text())
    assert_goes_on(found, unbroken)


@pytest.mark.soak
def test_a_run_goes_on_with_the_other_engine(launches, unbroken):
    saved = step_folder(launches.done(f"save:{MOE}:ep2"), worker.STEPS_BEFORE)
    engine = make_engine(launches.folder / MOE, Encoder(launches.folder / MOE))
    load_checkpoint(saved, engine, engine.ranks)
    assert engine.optimizer_steps == worker.STEPS_BEFORE
    layout = worker.FAMILY_LAYOUTS["one"]
    found = layouts.train(make_stepper(engine), layout, worker.STEPS_AFTER, launches.folder / MOE)
    assert_goes_on(found, unbroken)


@pytest.mark.soak
@pytest.mark.parametrize("job", LAUNCHES["pairs"])
def test_pairs_take_the_steps_of_the_hf_engine(launches, job):
    """Experts shared out, and features that go deep to both sequences of a pair."""
    found = layouts.Trained.load(launches.done(job))
    family = launches.folder / job.split(":")[1]
    engine = make_engine(family, Encoder(family))
    rows = worker.train_pairs(engine, layouts.LAYOUTS["one"], family)
    weights = {name: p.detach().clone() for name, p in engine.parameters()}
    start = layouts.start_weights(family)
    errors = layouts.worst_errors(found, layouts.Trained(rows, weights), start)
    print(f"\n{job} " + "  ".join(f"{what} {error:.1e}" for what, error in errors.items()))
    assert layouts.beyond_tolerance(errors) == {}
    assert rows[0][0] - rows[-1][0] > 0.1, "no lesson"
