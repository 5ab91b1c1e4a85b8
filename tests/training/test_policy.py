"""Rollouts in packed rows train what the papers say of each answer alone, in double.

The bounds are 1e-10 for log p, loss, report and gradients (relative L2).
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support.doubles import stock_double, use_double
from support.engines import make_engine, take_step, worst
from support.rollouts import drawn_groups, literal_log_p, literal_loss, noise_around
from support.shards import TINY_MODEL

from vlmpack.encode import Encoder
from vlmpack.errors import ObjectiveError
from vlmpack.packing import PackCollator, PadCollator
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.training.policy import policy
from vlmpack.training.reference import log_probabilities

PACKED = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8)
SHARED = replace(PACKED, share_prefix=True)
TIGHT = PackCollator(pad_token_id=561, num_position_axes=3)
PADDED = PadCollator(pad_token_id=561, num_position_axes=3)


def knobs(**given):
    return ObjectiveSection(name="policy", **given)


VARIANTS = {
    "grpo": knobs(average="sequence", kl_weight=0.04),
    "gspo": knobs(ratio="sequence", average="sequence", clip_low=0.02, clip_high=0.03),
    "gspo by tokens": knobs(ratio="sequence", clip_low=0.02, clip_high=0.03),
    "dapo": knobs(clip_high=0.28),
    "cispo": knobs(surrogate="cispo", clip_low=1.0, clip_high=0.28),
    "cispo by sequence": knobs(surrogate="cispo", ratio="sequence", clip_low=0.02, clip_high=0.03),
    "dr grpo": knobs(average="constant", average_tokens=150, advantage_scale="none"),
    "k1": knobs(kl_weight=0.3, kl="k1"),
    "k2": knobs(kl_weight=0.3, kl="k2"),
    "truncated": knobs(correction="truncated", correction_limit=1.3, kl_weight=0.1),
    "masked": knobs(correction="masked", correction_limit=1.3, average="sequence"),
    "old of the sampler": knobs(old="sampler"),
}
LENGTHS = ((200, 1, 7, 30), (1, 2, 3, 90), (12, 1, 40, 5))
"""Groups of 4, on 1, 0 and 2 images."""
LAYOUTS = {
    "rows over groups": (PACKED, ((0, 5, 1, 4), (), (2,), (3, 6, 9, 10), (7, 8, 11))),
    "one row": (TIGHT, (tuple(range(12)),)),
    "shared prefixes": (SHARED, ((0, 1, 2, 3, 5), (4, 6, 7, 8), (9, 10, 11))),
    "padded": (PADDED, ((0, 1, 2, 3), (4, 5, 6, 7, 8), (11, 9, 10))),
}


@pytest.fixture(scope="module")
def double():
    with pytest.MonkeyPatch.context() as patch:
        use_double(patch.setattr)
        yield


@pytest.fixture(scope="module")
def policy_encoder():
    return Encoder(TINY_MODEL).replace(share_prefix=True)


@pytest.fixture(scope="module")
def engine(double, policy_encoder):
    made = make_engine(TINY_MODEL, policy_encoder)
    made.vlm.double()
    return made


class Case:
    """Samples, what is known of them, and the literal results by variant."""

    def __init__(self, encoder, samples, *, is_raw=False):
        self.model, self.is_raw = stock_double(), is_raw
        log_p = literal_log_p(self.model, encoder, samples)
        self.known = noise_around(log_p)
        self.samples = self.known.given_to(samples)
        self.log_p = log_p

    def literal(self, section):
        self.model.zero_grad(set_to_none=True)
        loss, report = literal_loss(self.log_p, self.known, section, is_raw=self.is_raw)
        loss.backward(retain_graph=True)
        gradients = {n: p.grad.clone() for n, p in self.model.named_parameters()}
        return float(loss.detach()), report, gradients

    def batches(self, collate, rows):
        return [self.known.beside(collate([self.samples[n] for n in row]), row) for row in rows]


@pytest.fixture(scope="module")
def case(double, policy_encoder):
    """Temperatures 0.7 and 1 in turn."""
    return Case(policy_encoder, drawn_groups(policy_encoder, LENGTHS, temperatures=(0.7, 1.0)))


@pytest.fixture(scope="module")
def literal(case):
    found = {}

    def of(variant):
        if variant not in found:
            found[variant] = case.literal(VARIANTS[variant])
        return found[variant]

    return of


def reported_step(engine, objective, batches):
    """(loss, report, gradients) of one step, whose weights stay."""
    loss, found, totals = take_step(engine, objective, batches)
    return loss, objective.reported(totals), found


def far_off(found, wanted):
    """How far all gradients are off, relative."""
    far = torch.cat([(found[n] - wanted[n]).flatten() for n in wanted]).norm()
    return float(far / torch.cat([g.flatten() for g in wanted.values()]).norm())


@pytest.mark.cases(
    quick=("grpo-rows over groups", "gspo-shared prefixes", "cispo-padded", "masked-one row"),
    slow=("*-rows over groups", "grpo-shared prefixes", "cispo-shared prefixes"),
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_report_and_gradients_are_the_literal_ones(variant, layout, engine, case, literal):
    loss, report, gradients = literal(variant)
    collate, rows = LAYOUTS[layout]
    value, said, found = reported_step(
        engine, policy(VARIANTS[variant]), case.batches(collate, rows)
    )
    assert value == pytest.approx(loss, abs=1e-10)
    assert worst(found, gradients) < 1e-10
    assert min(float(each.norm()) for each in gradients.values()) > 1e-9, "each is trained"
    for name in said.keys() & report.keys():
        assert said[name] == pytest.approx(report[name], abs=1e-10)
    assert said["ratio"] != 1 and said["without_advantage"] == 1 / 12


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kept_log_probabilities_are_those_of_each_answer_alone(layout, engine, case):
    """Of every label token, at the temperature of its draw."""
    collate, rows = LAYOUTS[layout]
    for batch, row in zip(case.batches(collate, rows), rows, strict=True):
        found = torch.tensor(log_probabilities(engine, batch), dtype=torch.float64)
        if row:
            wanted = torch.cat([case.log_p[n].detach() for n in row])
            assert (found - wanted).abs().max() < 1e-11


def test_prefixes_are_shared_where_they_are_said_to_be(case):
    shared = case.batches(*LAYOUTS["shared prefixes"])
    assert sum(batch.num_shared_tokens for batch in shared) > 100
    assert sum(batch.num_shared_patches for batch in shared) > 0


def test_temperatures_divide_where_they_are_not_1(engine, case, literal):
    """The control: logits as they are."""
    _, _, gradients = literal("dapo")
    batches = case.batches(*LAYOUTS["rows over groups"])
    undivided = [
        replace(batch, rollouts=replace(batch.rollouts, temperatures=None))
        if batch.rollouts
        else batch
        for batch in batches
    ]
    *_, found = reported_step(engine, policy(VARIANTS["dapo"]), undivided)
    assert far_off(found, gradients) > 0.01


@pytest.mark.parametrize("variant", ["dapo", "k2", "truncated"])
def test_raw_values_at_another_temperature_correct_nothing(variant, engine, policy_encoder):
    """Raw log-probabilities are of no distribution that was drawn from, so no quotient is made."""
    samples = drawn_groups(policy_encoder, ((5, 9),), temperatures=(0.7,), is_raw=True)
    raw = Case(policy_encoder, samples, is_raw=True)
    loss, report, gradients = raw.literal(VARIANTS[variant])
    value, said, found = reported_step(
        engine, policy(VARIANTS[variant]), raw.batches(PACKED, ((1, 0),))
    )
    assert value == pytest.approx(loss, abs=1e-10)
    assert worst(found, gradients) < 1e-10
    assert said.get("limited", 0.0) == report["limited"] == 0
    assert said.get("correction", 1.0) == 1


@pytest.mark.cases(slow="dapo")
@pytest.mark.parametrize("variant", ["dapo", "gspo"])
def test_a_thousand_answers_that_no_tokenizer_would_write(variant, engine, policy_encoder):
    """Each in turn literally; then in rows of 25."""
    draw = random.Random(1)
    lengths = [[draw.randint(1, 12) for _ in range(4)] for _ in range(250)]
    samples = drawn_groups(policy_encoder, lengths, temperatures=(0.7, 1.0, 1.3))
    tokenizer = policy_encoder.tokenizer
    unwritten = 0
    for sample in samples:
        ids = sample.labels[sample.labels >= 0].tolist()
        unwritten += tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) != ids
    assert len(samples) == 1000 and unwritten > 700, unwritten
    many = Case(policy_encoder, samples)
    loss, _, gradients = many.literal(VARIANTS[variant])
    numbers = draw.sample(range(1000), 1000)
    rows = [tuple(numbers[at : at + 25]) for at in range(0, 1000, 25)]
    value, _, found = reported_step(engine, policy(VARIANTS[variant]), many.batches(PACKED, rows))
    assert value == pytest.approx(loss, abs=1e-10)
    assert worst(found, gradients) < 1e-10


# What is wrong


def columns(change):
    """Batches with another `Rollouts`."""

    def wrong(batches, _case):
        return [
            replace(batch, rollouts=change(batch.rollouts)) if batch.rollouts else batch
            for batch in batches
        ]

    return wrong


def mask_off_by_one(batches, _case):
    """The last prompt token is learnt, and the answer's last one is not."""
    moved = []
    for batch in batches:
        slots = batch.label_positions - 1
        labels, mask = batch.labels.clone().fill_(-100), torch.zeros_like(batch.loss_mask)
        labels.view(-1)[slots] = batch.input_ids.flatten()[slots + 1]
        mask.view(-1)[slots] = True
        moved.append(replace(batch, labels=labels, loss_mask=mask, label_positions=slots))
    return moved


def pixels_of_another(batches, _case):
    changed = []
    for batch in batches:
        if batch.media is not None:
            pixels = batch.media.pixel_values.roll(16, 0)
            batch = replace(batch, media=replace(batch.media, pixel_values=pixels))
        changed.append(batch)
    return changed


WRONG = {
    "the neighbour's advantages": columns(lambda r: replace(r, advantages=r.advantages.roll(1))),
    "another temperature": columns(lambda r: replace(r, temperatures=r.temperatures * 1.1)),
    "old taken for the sampler": columns(lambda r: replace(r, sampler=r.old)),
    "sampler taken for old": columns(lambda r: replace(r, old=r.sampler)),
    "mask off by one": mask_off_by_one,
    "pixels of another": pixels_of_another,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_found(wrong, engine, case, literal):
    _, _, gradients = literal("truncated")
    batches = WRONG[wrong](case.batches(*LAYOUTS["rows over groups"]), case)
    *_, found = reported_step(engine, policy(VARIANTS["truncated"]), batches)
    assert far_off(found, gradients) > 0.01


def test_a_mean_of_means_is_found(engine, case, literal):
    """Each row counts as one, as where a trainer averages over micro-batches."""
    _, _, gradients = literal("dapo")
    objective = policy(VARIANTS["dapo"])

    def sums(losses, batch):
        count = max(1, batch.num_label_tokens)
        return {name: value / count for name, value in objective.sums(losses, batch).items()}

    rows = case.batches(*LAYOUTS["rows over groups"])
    *_, found = reported_step(engine, replace(objective, sums=sums), rows)
    lengths = [
        torch.cat([g.flatten() for g in all_.values()]).norm() for all_ in (gradients, found)
    ]
    scaled = {name: each * lengths[0] / lengths[1] for name, each in found.items()}
    assert far_off(scaled, gradients) > 0.01


# Samples that the objective cannot use


def test_rows_without_what_the_loss_needs_are_refused(engine, case):
    [batch] = case.batches(PACKED, ((0, 1),))
    plain = replace(batch, rollouts=None)
    unweighed = replace(batch, rollouts=replace(batch.rollouts, advantages=None))
    alone = replace(batch, rollouts=replace(batch.rollouts, reference=None))
    for given, said in (
        (plain, "found no rollout: its record has no 'rollout'"),
        (unweighed, "found a rollout without an advantage"),
        (alone, "found a rollout without the reference model's log-probabilities"),
    ):
        with pytest.raises(ObjectiveError, match=said):
            reported_step(engine, policy(VARIANTS["grpo"]), [given])


def test_without_an_old_policy_the_step_is_its_own(engine, case, literal):
    """In a round of one step old and current are the same model: ratios are 1, gradients stay."""
    current = [one.detach() for one in case.log_p]
    known = replace(case.known, old=current)
    case_now = Case.__new__(Case)
    case_now.__dict__.update(case.__dict__, known=known)
    loss, _, gradients = case_now.literal(VARIANTS["dapo"])
    forget = columns(lambda rollouts: replace(rollouts, old=None))
    batches = forget(case.batches(*LAYOUTS["rows over groups"]), case)
    value, said, found = reported_step(engine, policy(VARIANTS["dapo"]), batches)
    assert said["ratio"] == 1 and said["clipped"] == 0
    assert value == pytest.approx(loss, abs=1e-10)
    assert worst(found, gradients) < 1e-10
