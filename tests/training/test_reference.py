"""The model without its adapters is the reference: bit by bit, and without a trace in training.

The kept log-probabilities: whole, resumable, and of nothing else.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.engines import make_engine, make_stepper, policy
from support.pairs import cooked_pair, raw_pairs
from support.shards import TINY_MODEL

from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError, ReferenceCacheError
from vlmpack.packing import PackCollator, PadCollator
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.training import reference
from vlmpack.training.preference import dpo
from vlmpack.training.reference import ReferenceFile, model_values, unknown, without_adapters

FACTS = {"weights": "ab", "dtype": "float32"}


def file(folder, **changes):
    return ReferenceFile(folder / "reference", FACTS | changes, 4)


def test_what_is_written_is_read_bit_by_bit(tmp_path):
    assert np.isnan(file(tmp_path).read()).all()
    file(tmp_path).write([(2, -1 / 3, -2.5), (0, -1e-300, -7.0)])
    file(tmp_path).write([(3, -4.0, -5.0)])
    file(tmp_path).write([])
    found = file(tmp_path).read()
    assert found[[0, 2, 3]].tolist() == [[-1e-300, -7.0], [-1 / 3, -2.5], [-4.0, -5.0]]
    assert np.isnan(found[1]).all(), "what is missing is made by the next pass"


def test_tokens_of_rollouts_are_read_bit_by_bit(tmp_path):
    """As many as each answer has."""
    of_tokens = replace(file(tmp_path), of_tokens=True)
    assert unknown(of_tokens.read()).all()
    of_tokens.write([(0, -1 / 3), (2, -1e-300, -7.0, -0.0)])
    of_tokens.write([(3, -4.0, -5.0)])
    found = of_tokens.read()
    assert unknown(found).tolist() == [False, True, False, False]
    known = [found[n].tolist() for n in (0, 2, 3)]
    assert known == [[-1 / 3], [-1e-300, -7.0, -0.0], [-4.0, -5.0]]


def test_another_reference_is_refused_with_every_difference(tmp_path):
    file(tmp_path).write([(0, 1.0, 2.0)])
    with pytest.raises(ReferenceCacheError) as caught:
        file(tmp_path, weights="cd", date="2026-11-22").read()
    text = str(caught.value)
    assert "weights: ab there, cd here" in text
    assert "date: missing there, 2026-11-22 here" in text
    assert "dtype" not in text
    assert "objective.reference_dir, by default `reference` in run_dir" in text
    assert "may be another run's" in text
    assert "emove" not in text
    assert file(tmp_path).is_there
    assert not file(tmp_path / "other").is_there


def test_a_damaged_part_is_made_again_and_a_damaged_record_refused(tmp_path, caplog):
    file(tmp_path).write([(0, 1.0, 2.0)])
    file(tmp_path).write([(1, 3.0, 4.0)])
    first = min((tmp_path / "reference").glob("*.part"))
    data = bytearray(first.read_bytes())
    data[9] ^= 1
    first.write_bytes(data)
    found = file(tmp_path).read()
    assert np.isnan(found[0]).all()
    assert found[1].tolist() == [3.0, 4.0]
    assert "is damaged; its samples are computed again" in caplog.text
    record = tmp_path / "reference" / "reference.json"
    record.write_text(record.read_text().replace('"vlmpack_format": 1', '"vlmpack_format": 9'))
    with pytest.raises(
        ReferenceCacheError, match=r"has vlmpack_format 9.* another objective\.reference_dir"
    ):
        file(tmp_path).read()
    record.write_text("{")
    with pytest.raises(
        ReferenceCacheError,
        match=r"is damaged: .*put the file back, or have .*objective.reference_dir",
    ):
        file(tmp_path).read()


@pytest.mark.parametrize("record", ["lost", "new", "another's"])
def test_a_part_of_another_reference_is_refused_by_name_whatever_the_record_says(tmp_path, record):
    other, own = file(tmp_path, weights="cd"), file(tmp_path)
    other.write([(0, 1.0, 2.0)])
    own_record = file(tmp_path / "own")
    own_record.write([(0, 3.0, 4.0)])
    there = tmp_path / "reference" / "reference.json"
    there.unlink()
    if record == "new":
        there.write_bytes((tmp_path / "own" / "reference" / "reference.json").read_bytes())
    if record == "another's":  # the records were exchanged
        own = file(tmp_path, weights="ef")
        there.write_text(json.dumps({"vlmpack_format": 1, "facts": dict(own.facts)}))
    [part] = there.parent.glob("*.part")
    words = rf"{part} holds log-probabilities of another reference, although reference.json .*_dir"
    assert own.is_there, "a launch looks before it loads a model"
    for refused in (own.refuse_other, own.read):
        with pytest.raises(ReferenceCacheError, match=words):
            refused()


def test_a_record_that_is_lost_is_written_anew_beside_parts_of_the_same_reference(tmp_path):
    file(tmp_path).write([(0, 1.0, 2.0)])
    record = tmp_path / "reference" / "reference.json"
    whole = record.read_bytes()
    record.unlink()
    assert file(tmp_path).read()[0].tolist() == [1.0, 2.0]
    file(tmp_path).write([(1, 3.0, 4.0)])
    assert record.read_bytes() == whole


def test_two_runs_that_begin_one_folder_do_not_mix(tmp_path):
    file(tmp_path).write([(0, 1.0, 2.0)])
    with pytest.raises(ReferenceCacheError, match="weights: ab there, cd here"):
        file(tmp_path, weights="cd").write([(1, 3.0, 4.0)])
    assert file(tmp_path).read()[0].tolist() == [1.0, 2.0]


def test_a_part_of_an_earlier_version_is_refused(tmp_path):
    """It has a seal over its rows alone."""
    data = np.array([(0, 1.0, 2.0)], dtype=reference._ROW).tobytes()
    folder = tmp_path / "reference"
    folder.mkdir()
    (folder / "000000000-00000000.part").write_bytes(data + reference._digest(data))
    with pytest.raises(ReferenceCacheError, match="another reference"):
        file(tmp_path).read()


def test_a_folder_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "reference").write_text("a file")
    with pytest.raises(ReferenceCacheError, match="cannot be written"):
        file(tmp_path).write([(0, 1.0, 2.0)])


COLLATES = {
    "packed": PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8),
    "padded": PadCollator(pad_token_id=561, num_position_axes=3),
}
ADAPTERS = {"LoRA": {}, "DoRA": {"dora": True}, "dropout": {"dropout": 0.5}}


def kinds(*quick):
    """All adapters, of which only the named ones in quick tests."""
    slow = pytest.mark.slow
    return [kind if kind in quick else pytest.param(kind, marks=slow) for kind in ADAPTERS]


@pytest.fixture(scope="module")
def pair_encoder():
    return Encoder(TINY_MODEL).replace(pairs=True)


@pytest.fixture(scope="module")
def pairs(pair_encoder):
    return [pair_encoder.encode(cooked_pair(*pair)) for pair in raw_pairs()]


def adapted(encoder, projector="frozen", **lora):
    """An engine with adapters in tower and language model that are not at their start."""
    wanted = policy("lora", projector, "lora", **lora)
    engine = make_engine(TINY_MODEL, encoder, policy=wanted)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in engine.parameters():
            if ".lora_B." in name:
                value.add_(0.05 * torch.randn(value.shape, generator=draw))
    return engine


def batches_of(collate, pairs):
    return [collate(pairs[:3]), collate(pairs[3:4]), collate(pairs[4:])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("LoRA", "packed"),
        pytest.param("LoRA", "padded", marks=pytest.mark.slow),
        pytest.param("DoRA", "packed", marks=pytest.mark.slow),
    ],
)
def test_without_its_adapters_it_is_the_model_that_it_began_with(kind, layout, pair_encoder, pairs):
    engine = adapted(pair_encoder, **ADAPTERS[kind])
    base = make_engine(TINY_MODEL, pair_encoder, policy=policy("frozen", "frozen", "full"))
    marked = [name for name, _ in engine.parameters()]
    state = torch.get_rng_state()
    batches = batches_of(COLLATES[layout], pairs)
    found = without_adapters(engine, batches)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"
    assert [name for name, _ in engine.parameters()] == marked
    for batch, given in zip(batches, found, strict=True):
        assert torch.equal(given.reference, model_values(base, batch)), "what a cache would hold"
        assert (given.reference - model_values(engine, batch)).abs().min() > 1e-4, "they matter"


@pytest.mark.cases(slow="DoRA")
@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds("dropout"))
def test_steps_are_those_of_a_run_that_kept_the_same_numbers(kind, pair_encoder, pairs):
    """Bit by bit over three steps; dropout draws what it would have drawn."""
    found = []
    for cached in (True, False):
        engine = adapted(pair_encoder, **ADAPTERS[kind])
        stepper = make_stepper(engine, objective=dpo(ObjectiveSection(name="dpo", sft_weight=0.1)))
        stepper.dropout_seed = 7 if kind == "dropout" else None
        batches = batches_of(COLLATES["packed"], pairs)
        if cached:
            batches = without_adapters(engine, batches)
        else:
            stepper.reference = without_adapters
        steps = [
            stepper.train(step, batches, num_skipped=0, stop=False)[0].totals for step in range(3)
        ]
        steps.append(stepper.evaluate(batches[:1]).totals)
        found.append((steps, {name: value.detach() for name, value in engine.parameters()}))
    (ours, weights), (theirs, others) = found
    assert ours == theirs
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert ours[0]["margin_sum"] != ours[2]["margin_sum"], "it learns"


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds("LoRA"))
def test_at_its_start_every_margin_is_0(kind, pair_encoder, pairs):
    """Adapters begin without effect, and both run the same row."""
    lora = policy("lora", "lora", "lora", **ADAPTERS[kind])
    engine = make_engine(TINY_MODEL, pair_encoder, policy=lora)
    stepper = make_stepper(engine, objective=dpo(ObjectiveSection(name="dpo")))
    stepper.reference = without_adapters
    batches = batches_of(COLLATES["packed"], pairs)
    totals = stepper.train(0, batches, num_skipped=0, stop=False)[0].totals
    bound = 1e-4 if kind == "DoRA" else 0.0
    assert abs(totals["margin_sum"]) <= bound
    assert totals["accuracy_sum"] == 3.0 or kind == "DoRA"
    assert abs(stepper.train(1, batches, num_skipped=0, stop=False)[0].totals["margin_sum"]) > 1e-4


def test_more_than_adapters_that_is_trained_is_named(pair_encoder, pairs):
    engine = adapted(pair_encoder, projector="full")
    batch = COLLATES["packed"](pairs[:1])
    with pytest.raises(CapabilityError, match=r"visual\.merger\.\S+, .* are trained too; use"):
        without_adapters(engine, [batch])
    bare = make_engine(TINY_MODEL, pair_encoder, policy=policy("frozen", "frozen", "full"))
    with pytest.raises(CapabilityError, match="are trained too"):
        without_adapters(bare, [batch])


def test_a_reference_with_its_adapters_on_is_found(pair_encoder, pairs):
    """The comparison above sees it: with them on, the margins of an adapted model are all 0."""
    engine = adapted(pair_encoder)
    stepper = make_stepper(engine, objective=dpo(ObjectiveSection(name="dpo")))
    batch = COLLATES["packed"](pairs)
    own = replace(batch, reference=model_values(engine, batch))
    assert stepper.evaluate([own]).totals["margin_sum"] == 0.0
    stepper.reference = without_adapters
    assert abs(stepper.evaluate([batch]).totals["margin_sum"]) > 1e-3
