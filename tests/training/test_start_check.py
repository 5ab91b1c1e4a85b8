"""The first step of a run sees that its reference is its own model, of the same pairs."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.engines import make_engine, make_stepper
from support.pairs import cooked_pair, raw_pairs
from support.shards import TINY_MODEL

from vlmpack.encode import Encoder
from vlmpack.errors import ReferenceCacheError
from vlmpack.packing import PackCollator
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.training.preference import dpo
from vlmpack.training.reference import FLOORS, Noise, StartCheck, log_probabilities, measured_noise

COLLATE = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8)


@pytest.fixture(scope="module")
def pair_encoder():
    return Encoder(TINY_MODEL).replace(pairs=True)


@pytest.fixture(scope="module")
def pairs(pair_encoder):
    return [pair_encoder.encode(cooked_pair(*pair)) for pair in raw_pairs()]


@pytest.fixture
def engine(pair_encoder):
    return make_engine(TINY_MODEL, pair_encoder)


@pytest.fixture(scope="module")
def numbers(pair_encoder, pairs):
    """(12,) the model's own, each pair in a row of its own."""
    engine = make_engine(TINY_MODEL, pair_encoder)
    found = [x for pair in pairs for x in log_probabilities(engine, COLLATE([pair]))]
    return torch.tensor(found, dtype=torch.float64)


def first_step(engine, pairs, reference, *, step=0):
    """One step of two rows and an empty one."""
    stepper = make_stepper(engine, objective=dpo(ObjectiveSection(name="dpo", sft_weight=0.1)))
    noise = Noise(FLOORS[torch.float32])
    stepper.start = StartCheck(engine=engine, noise=noise, cause="the numbers in there are stale")
    batches = [
        replace(COLLATE(pairs[first:last]), reference=reference[2 * first : 2 * last])
        for first, last in ((0, 4), (4, 4), (4, 6))
    ]
    return stepper.train(step, batches, num_skipped=0, stop=False)[0]


def test_rows_of_other_pairs_differ_by_rounding(engine, pairs, numbers, caplog):
    with caplog.at_level(logging.INFO, logger="vlmpack"):
        sums = first_step(engine, pairs, numbers)
    assert sums.num_samples == 6
    assert "policy and reference say the same of 12 sequences: log p within" in caplog.text


def weights(engine):
    return [value.detach().clone() for _, value in engine.parameters()]


def test_a_reference_off_by_a_pair_is_named(engine, pairs, numbers):
    before = weights(engine)
    with pytest.raises(ReferenceCacheError) as caught:
        first_step(engine, pairs, numbers.roll(2))
    off = (numbers.roll(2) - numbers).abs()
    worst = int(off.argmax())
    said = str(caught.value)
    side = ("chosen", "rejected")[worst % 2]
    assert f"the {side} answer of sample 'pair{worst // 2}' has log p" in said
    assert f"{float(numbers.roll(2)[worst]):.6g} under the reference" in said
    assert f"{float(off.max()):.3g} apart. 12 of 12 sequences are too far off" in said
    assert "The likely cause: the numbers in there are stale. No weight has changed" in said
    assert all(map(torch.equal, before, weights(engine)))


def test_one_pair_with_its_sides_swapped_is_named(engine, pairs, numbers):
    swapped = numbers.clone()
    swapped[[8, 9]] = numbers[[9, 8]]
    with pytest.raises(ReferenceCacheError, match=r"sample 'pair4' has .*\. 2 of 12 sequences are"):
        first_step(engine, pairs, swapped)


def test_another_models_numbers_are_found(engine, pairs, numbers):
    with torch.no_grad():
        for _, value in engine.parameters():
            value.mul_(1.001)
    with pytest.raises(ReferenceCacheError, match="likely cause: the numbers in there"):
        first_step(engine, pairs, numbers)


def test_a_model_that_computes_otherwise_while_it_trains_is_told_apart(engine, pairs, numbers):
    def drop(module, _args, output):
        return output * 1.01 if module.training else output

    engine.vlm.language.norm.register_forward_hook(drop)
    with pytest.raises(ReferenceCacheError, match=r"computes otherwise while it trains\. Look for"):
        first_step(engine, pairs, numbers)


def test_later_steps_are_not_looked_at(engine, pairs, numbers, monkeypatch):
    """Nor is a resumed run: its policy has moved."""
    monkeypatch.setattr(engine, "optimizer_steps", 1)
    first_step(engine, pairs, numbers.roll(2), step=1)


class Planned:
    """Pairs as a split whose first global batch is all of them, in such rows."""

    def __init__(self, pairs, rows):
        self.pairs = pairs
        self.rows = rows
        self.asked = []
        self.split = SimpleNamespace(places=lambda numbers: numbers)

    def start(self):
        return None

    def planned(self, _state, _most):
        return iter([SimpleNamespace(bins=self.rows)])

    def numbered_batches(self, numbers, *, rank, dp, together, replica=None):
        for at in range(0, len(numbers), together):
            row = numbers[at : at + together]
            self.asked.append(tuple(row))
            samples = tuple(SimpleNamespace(number=number) for number in row)
            yield SimpleNamespace(batch=COLLATE([self.pairs[n] for n in row]), samples=samples)


ONES = [(5,), (3,), (1,), (0,), (2,), (4,)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "asked"),
    [
        ([(5, 3, 1), (0, 2, 4)], [(5, 3, 1), (0, 2, 4), *ONES]),
        (ONES, [*ONES, (5, 3), (1, 0), (2, 4)]),
    ],
)
def test_what_two_packings_differ_by_is_measured(rows, asked, engine, pairs):
    """Other rows than the first step's, also where each pair has its own."""
    train = Planned(pairs, rows)
    found = measured_noise(engine, train, engine.ranks, torch.float32)
    assert train.asked == asked
    assert found.floor == 1e-4
    assert 0 < found.measured < 1e-5, "rounding of another row, a root of a token"
    assert measured_noise(engine, train, engine.ranks, torch.bfloat16).floor == 1e-2


def test_what_rounding_explains_grows_with_an_answer():
    assert Noise(1e-4).limit(10_000) == 1e-4
    assert Noise(1e-4, 1e-3).limit(100) == pytest.approx(0.08)
    assert Noise(1e-2, 1e-4).limit(4) == 1e-2
