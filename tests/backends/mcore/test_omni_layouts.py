"""Nemotron Omni, whose projector lies beside its tower and whose files have other names than the
model, takes the optimizer steps of the hf engine in one process in layouts of Megatron's.

Its language model is that of `test_mamba_layouts.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from backends.mcore import hybrid_layouts as worker
from backends.mcore.launches import FamilyLaunches
from safetensors.torch import load_file
from support import layouts
from support.families import TINY, write_tiny
from support.stock import load_stock
from support.tiny_nemotron_omni import AUDIO, config

from vlmpack.backends.policy import is_untouched
from vlmpack.families.nemotron_omni import FAMILY

pytestmark = pytest.mark.soak

NAME, MORE = "nemotron_h_omni", "more"
"""`more` has what no sample reaches: a tower for sounds, and a norm that no file has to hold."""

UNMOVED = "attention.k_proj.bias"
"""Moves all scores of a query alike, so that its gradient is rounding alone."""

KINDS = ["linear_attention", "moe", "full_attention", "linear_attention", "mlp", "moe"]

LAUNCHES = {
    "two": [
        *(f"train:{NAME}:{name}" for name in ("cp2", "pp2", "dp2", "tp2-selective")),
        *(f"train:{NAME}:{name}" for name in ("tp2-ep2", "cp2-ep2")),
        f"train:{MORE}:cp2",
        f"export:{MORE}:pp2",
    ],
    "four": [f"train:{NAME}:{name}" for name in ("tp2-cp2", "tp2-pp2-sp", "cp2-pp2")],
}
"""Jobs that share processes."""

TRAINED = [job for jobs in LAUNCHES.values() for job in jobs if job.startswith("train:")]


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("omni")
    for name, others in ((NAME, {}), (MORE, {"audio_config": AUDIO})):
        made = config(**others)
        made.text_config.layers_block_type = KINDS
        made.text_config.num_nextn_predict_layers = int(name == MORE)
        (folder / name).mkdir()
        write_tiny(replace(TINY[NAME], config=lambda made=made: made), folder / name)
    return FamilyLaunches(worker.__file__, folder, LAUNCHES, worker.LAYOUTS)


@pytest.mark.parametrize("optimizer", layouts.OPTIMIZERS)
@pytest.mark.parametrize("job", TRAINED)
def test_five_steps_are_those_of_one_process(launches, job, optimizer):
    family = job.split(":")[1]
    begin, reference = launches.start(family), launches.expected(family, optimizer)
    found = launches.trained(job, optimizer)
    rest = found.weights.keys() - begin.keys()
    assert rest and all(is_untouched(name, FAMILY.modules) for name in rest)
    compared = {name: value for name, value in begin.items() if not name.endswith(UNMOVED)}
    ours, theirs = (
        replace(each, weights={name: each.weights[name] for name in compared})
        for each in (found, reference)
    )
    errors = layouts.worst_errors(ours, theirs, compared)
    print(f"\n{job} {optimizer}: " + "  ".join(f"{n} {e:.1e}" for n, e in errors.items()))
    assert layouts.beyond_tolerance(errors) == {}
    for part in ("vision_model.encoder.layer.0.", "multi_modal_projector.linear_1."):
        moved = [
            layouts.relative_l2(reference.weights[name], value)
            for name, value in compared.items()
            if name.startswith(part)
        ]
        assert moved and min(moved) > 1e-6


@pytest.mark.parametrize("job", TRAINED)
def test_weights_are_read_bit_by_bit_and_copies_agree(launches, job):
    facts = json.loads(launches.done(job).with_suffix(".json").read_text())
    assert len(facts) == worker.LAYOUTS[job.split(":")[2]].processes
    for fact in facts:
        assert fact["changed"] == []
        assert fact["copies agree, adamw"]
        assert fact["copies agree, sgd"]


def test_an_export_has_the_bits_of_the_original(launches):
    """What no sample reaches among them, statistics of norms included."""
    exported, original = launches.done(f"export:{MORE}:pp2"), launches.folder / MORE
    ours, theirs = (load_file(str(path / "model.safetensors")) for path in (exported, original))
    assert ours.keys() == theirs.keys()
    assert any("sound_encoder" in name and "running_mean" in name for name in theirs)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value) and ours[name].dtype == value.dtype, name
    stock = load_stock(exported).state_dict()
    for name, value in load_stock(original).state_dict().items():
        assert torch.equal(stock[name], value), name
