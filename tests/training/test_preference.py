"""Pairs in packed rows train what the stock model does, one sequence at a time, in double.

The bounds are 1e-11 for an answer's log p, 1e-13 for the loss, 1e-12 for gradients (relative L2).
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from support.doubles import stock_double, stock_log_p, stock_loss, use_double
from support.engines import make_engine, make_stepper, take_step, worst
from support.pairs import cooked_pair, raw_pairs
from support.shards import TINY_MODEL

from vlmpack.encode import Encoder
from vlmpack.errors import ReferenceCacheError
from vlmpack.packing import IGNORE_INDEX, PackCollator, PadCollator
from vlmpack.packing.pairs import sequences_of
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.training import preference
from vlmpack.training.preference import PreferenceSums, dpo
from vlmpack.training.reference import log_probabilities

PACKED = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8)
SHARED = replace(PACKED, share_prefix=True)
TIGHT = PackCollator(pad_token_id=561, num_position_axes=3)
PADDED = PadCollator(pad_token_id=561, num_position_axes=3)

KNOBS = {
    "sigmoid": ObjectiveSection(name="dpo", beta=0.2, label_smoothing=0.1, sft_weight=0.3),
    "ipo": ObjectiveSection(name="dpo", beta=0.3, loss="ipo", sft_weight=0.5),
    "hinge": ObjectiveSection(name="dpo", beta=0.1, loss="hinge"),
}
LAYOUTS = {
    "rows of 3, 1, 2": (PACKED, ((0, 1, 2), (3,), (4, 5))),
    "one row": (TIGHT, ((0, 1, 2, 3, 4, 5),)),
    "other order, an empty row": (PACKED, ((5, 3), (), (0, 4, 2, 1))),
    "shared prefixes": (SHARED, ((0, 1, 2), (), (3,), (5, 4))),
    "padded": (PADDED, ((0, 1), (2,), (3, 4, 5))),
}


@pytest.fixture(scope="module")
def pair_encoder():
    return Encoder(TINY_MODEL).replace(pairs=True, share_prefix=True)


@pytest.fixture(scope="module")
def pairs(pair_encoder):
    """Six pairs on 0 to 3 images; the last one's answers are one token each."""
    found = [pair_encoder.encode(cooked_pair(*pair)) for pair in raw_pairs()]
    short = found[-1].labels.clone()
    for part, start in zip(sequences_of(found[-1]), (0, found[-1].sequences[0]), strict=True):
        [*places] = (part.labels != IGNORE_INDEX).nonzero()[:-1, 0].tolist()
        short[[start + place for place in places]] = IGNORE_INDEX
    return [*found[:-1], replace(found[-1], labels=short)]


@pytest.fixture(scope="module")
def double():
    with pytest.MonkeyPatch.context() as patch:
        use_double(patch.setattr)
        yield


@pytest.fixture(scope="module")
def stock(double, pair_encoder, pairs):
    """(log p, reference, label tokens, losses by name, gradients by name)."""
    model = stock_double()
    tokens = [int((part.labels != -100).sum()) for pair in pairs for part in sequences_of(pair)]
    log_p = stock_log_p(model, pair_encoder, pairs)
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(len(log_p), generator=draw, dtype=torch.float64)
    reference, tokens = log_p.detach() + 5 * noise, torch.tensor(tokens)
    losses, gradients = {}, {}
    for name, knobs in KNOBS.items():
        model.zero_grad(set_to_none=True)
        loss = stock_loss(log_p, reference, tokens, knobs)
        loss.backward(retain_graph=True)
        losses[name] = float(loss.detach())
        gradients[name] = {n: p.grad.clone() for n, p in model.named_parameters()}
    return log_p.detach(), reference, tokens, losses, gradients


@pytest.fixture(scope="module")
def engine(double, pair_encoder):
    made = make_engine(TINY_MODEL, pair_encoder)
    made.vlm.double()
    return made


def batches_of(layout, pairs, reference):
    collate, rows = LAYOUTS[layout]
    batches = []
    for row in rows:
        batch = collate([pairs[place] for place in row])
        places = [2 * place + k for place in row for k in (0, 1)]
        batches.append(replace(batch, reference=reference[places]))
    return batches


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probabilities_are_those_of_each_answer_alone(layout, engine, pairs, stock):
    log_p, reference = stock[:2]
    for batch, row in zip(batches_of(layout, pairs, reference), LAYOUTS[layout][1], strict=True):
        found = torch.tensor(log_probabilities(engine, batch), dtype=torch.float64)
        wanted = log_p[[2 * place + k for place in row for k in (0, 1)]]
        assert (found - wanted).abs().max().item() < 1e-11 if row else not found.numel()


def test_prefixes_are_shared_where_they_are_said_to_be(pairs, stock):
    shared = batches_of("shared prefixes", pairs, stock[1])
    saved = [batch.num_shared_tokens for batch in shared]
    assert min(saved[0], saved[2], saved[3]) > 0
    separate = PACKED(pairs)
    assert sum(batch.num_tokens for batch in shared) == separate.num_tokens
    assert sum(batch.num_slots for batch in shared) < 0.75 * separate.num_slots


@pytest.mark.cases(
    quick=("sigmoid-rows of 3, 1, 2", "sigmoid-shared prefixes", "ipo-one row", "hinge-padded"),
    slow="hinge-other order, an empty row",
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", KNOBS)
def test_loss_and_every_gradient_are_the_unpacked_ones(loss, layout, engine, pairs, stock):
    *_, losses, gradients = stock
    value, found, totals = take_step(engine, dpo(KNOBS[loss]), batches_of(layout, pairs, stock[1]))
    assert value == pytest.approx(losses[loss], abs=1e-13)
    assert worst(found, gradients[loss]) < 1e-12
    assert totals["num_pairs"] == totals["num_samples"] == 6
    assert min(float(g.norm()) for g in gradients[loss].values()) > 1e-9, "each is trained"


def test_the_tower_encodes_the_images_of_a_pair_once(engine, pairs, stock):
    seen = []
    hook = engine.vlm.vision.register_forward_pre_hook(
        lambda _module, args, given: seen.append(len(given["tower_inputs"].images.lengths)),
        with_kwargs=True,
    )
    batches = batches_of("rows of 3, 1, 2", pairs, stock[1])
    for batch in batches:
        log_probabilities(engine, batch)
    hook.remove()
    wanted = [sum(p.media.num_images for p in pairs[a:b] if p.media) for a, b in ((0, 3), (3, 4))]
    assert seen[:2] == wanted
    assert len(seen) == 3


class Broken:
    """Ways to get it wrong; each takes the batches of a step."""

    @staticmethod
    def means(batches):
        """Each row counts as one, as where a trainer averages over packs."""
        return batches

    @staticmethod
    def chosen_for_rejected(batches):
        return [replace(batch, label_sequences=batch.label_sequences ^ 1) for batch in batches]

    @staticmethod
    def reference_of_the_next_pair(batches):
        return [replace(batch, reference=batch.reference.roll(2)) for batch in batches]

    @staticmethod
    def images_of_another_pair(batches):
        return [
            batch
            if batch.media_sources is None
            else replace(batch, media_sources=batch.media_sources.roll(4))
            for batch in batches
        ]

    @staticmethod
    def one_segment(batches):
        return [
            replace(
                batch,
                cu_seqlens=torch.tensor([0, batch.num_slots], dtype=torch.int32),
                cu_seqlens_padded=None,
                segment_lengths=(batch.num_slots,),
            )
            for batch in batches
        ]

    @staticmethod
    def labels_rolled_over_the_row(batches):
        moved = []
        for batch in batches:
            labels = torch.roll(batch.labels, 1)
            mask = labels != IGNORE_INDEX
            moved.append(
                replace(
                    batch,
                    labels=labels,
                    loss_mask=mask,
                    label_positions=mask.flatten().nonzero()[:, 0],
                )
            )
        return moved

    ALL: ClassVar = (
        "means",
        "chosen_for_rejected",
        "reference_of_the_next_pair",
        "images_of_another_pair",
        "one_segment",
        "labels_rolled_over_the_row",
    )


@pytest.mark.cases(
    quick="one_segment", slow=("images_of_another_pair", "reference_of_the_next_pair")
)
@pytest.mark.parametrize("how", Broken.ALL)
def test_what_is_wrong_is_found(how, engine, pairs, stock):
    *_, gradients = stock
    batches = getattr(Broken, how)(batches_of("rows of 3, 1, 2", pairs, stock[1]))
    objective = dpo(KNOBS["sigmoid"])
    if how == "means":
        own = objective.sums

        def sums(losses, batch):
            return {n: v / batch.num_pairs for n, v in own(losses, batch).items()}

        objective = replace(objective, sums=sums)
    _, found, _ = take_step(engine, objective, batches)
    wanted = gradients["sigmoid"]
    far = torch.cat([(found[n] - wanted[n]).flatten() for n in wanted]).norm()
    assert far / torch.cat([g.flatten() for g in wanted.values()]).norm() > 0.01


@pytest.mark.cases(slow="slots")
@pytest.mark.parametrize("how", ["bfloat16", "slots"])
def test_wrong_sums_are_found(how, engine, pairs, stock, monkeypatch):
    """Sums in bfloat16; an answer's tokens counted with its padding (`ipo`)."""
    own = preference.sequence_sums
    if how == "bfloat16":
        monkeypatch.setattr(
            preference,
            "sequence_sums",
            lambda values, batch: own(values.bfloat16(), batch).bfloat16().double(),
        )
    else:
        monkeypatch.setattr(
            preference, "label_tokens", lambda batch: torch.tensor(batch.segment_lengths).double()
        )
    loss = "ipo" if how == "slots" else "sigmoid"
    value, found, _ = take_step(
        engine, dpo(KNOBS[loss]), batches_of("rows of 3, 1, 2", pairs, stock[1])
    )
    assert abs(value - stock[3][loss]) > 1e-4
    assert worst(found, stock[4][loss]) > 1e-4


def test_no_sequence_sees_another(engine, pairs, stock):
    """What changes in one leaves the others bit-equal, the other answer of its pair too; and no
    gradient goes there."""
    batch = PACKED(pairs[:4])
    before = log_probabilities(engine, batch)
    draw, starts = random.Random(0), [0]
    for slots in batch.segment_lengths:
        starts.append(starts[-1] + slots)
    for changed in range(8):
        ids, positions = batch.input_ids.clone(), batch.position_ids.clone()
        for slot in range(starts[changed], starts[changed] + batch.lengths[changed]):
            if slot not in set(batch.media_positions.tolist()):
                ids[0, slot] = draw.randrange(20, 500)
            positions[:, 0, slot] += slot % 3
        after = log_probabilities(engine, replace(batch, input_ids=ids, position_ids=positions))
        assert [n for n in range(8) if after[n] != before[n]] == [changed]
    pixels = batch.media.pixel_values.clone()
    pixels[: pairs[0].media.pixel_values.shape[0]] += 1
    after = log_probabilities(
        engine, replace(batch, media=replace(batch.media, pixel_values=pixels))
    )
    assert [n for n in range(8) if after[n] != before[n]] == [0, 1]
    for kept in (0, 5):
        gradient = input_gradient(engine, batch, kept)
        touched = gradient.abs().sum(dim=1).nonzero()[:, 0]
        assert touched.min() >= starts[kept]
        assert touched.max() < starts[kept] + batch.lengths[kept]


def input_gradient(engine, batch, sequence):
    """(T, D) of what enters the decoder, of one sequence's log p."""
    found = []

    def keep(_module, args, given):
        given["inputs_embeds"].register_hook(found.append)

    with engine.vlm.language.register_forward_pre_hook(keep, with_kwargs=True):
        losses = engine.vlm(batch, batch.packed_seq_params())
        preference.sequence_log_probabilities(losses, batch)[sequence].backward()
    engine.zero_gradients()
    return found[0].flatten(0, -2)


@pytest.mark.cases(quick="rows of 3, 1, 2")
@pytest.mark.parametrize("layout", ["rows of 3, 1, 2", "padded"])
def test_with_the_policy_as_reference_margins_are_0_and_the_loss_is_ln_2(layout, engine, pairs):
    """At step 0, by the numbers of the same rows."""
    batches = batches_of(layout, pairs, torch.zeros(12, dtype=torch.float64))
    own = [log_probabilities(engine, batch) for batch in batches]
    batches = [
        replace(batch, reference=torch.tensor(log_p, dtype=torch.float64))
        for batch, log_p in zip(batches, own, strict=True)
    ]
    section = ObjectiveSection(name="dpo", beta=0.1)
    value, _, totals = take_step(engine, dpo(section), batches)
    assert value == math.log(2)
    assert totals["margin_sum"] == 0.0
    assert totals["accuracy_sum"] == 3.0, "ties count half"
    others = batches_of("one row", pairs, torch.cat([batch.reference for batch in batches]))
    value, _, totals = take_step(engine, dpo(section), others)
    assert abs(totals["margin_sum"]) < 1e-11, "another row: the noise of the type"
    assert value == pytest.approx(math.log(2), abs=1e-12)


def test_at_step_0_a_pair_pulls_its_answers_in_opposite_ways(pairs):
    batch = PACKED(pairs[:3])
    losses = torch.rand(batch.num_label_tokens, dtype=torch.float64, requires_grad=True)
    log_p = preference.sequence_log_probabilities(losses, batch).detach()
    section = ObjectiveSection(name="dpo", beta=0.1)
    PreferenceSums(section=section)(losses, replace(batch, reference=log_p))["loss_sum"].backward()
    signs = 1 - 2 * (batch.label_sequences % 2)
    assert torch.allclose(losses.grad, signs.double() * 0.05, rtol=1e-15, atol=0), (
        "beta / 2; by 1 / N later"
    )


def test_identical_answers_teach_nothing_and_are_counted(engine, pair_encoder, pairs):
    chosen, rejected = raw_pairs()[0]
    same = pair_encoder.encode(cooked_pair(chosen, replace(rejected, messages=chosen.messages)))
    batch = PACKED([same, pairs[1]])
    batch = replace(batch, reference=torch.zeros(4, dtype=torch.float64))
    _, _, totals = take_step(engine, dpo(ObjectiveSection(name="dpo")), [batch])
    assert totals["num_identical"] == 1
    assert totals["num_pairs"] == 2


def test_pairs_without_a_reference_are_refused(engine, pairs):
    stepper = make_stepper(engine, objective=dpo(ObjectiveSection(name="dpo")))
    with pytest.raises(
        ReferenceCacheError, match="'pair0' and the others of its batch come without"
    ):
        stepper.evaluate([PACKED(pairs[:2])])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200))
def test_any_pairs_in_any_rows(seed, engine, pair_encoder):
    """Random pairs on 0 to 3 images, random rows, alignment, loss and reference."""
    draw = random.Random(seed)
    raw = draw.sample(raw_pairs(seed), k=draw.randint(1, 6))
    pairs = [pair_encoder.encode(cooked_pair(*pair)) for pair in raw]
    knobs = KNOBS[draw.choice(list(KNOBS))]
    model = stock_double()
    log_p = stock_log_p(model, pair_encoder, pairs)
    tokens = [int((part.labels != -100).sum()) for pair in pairs for part in sequences_of(pair)]
    noise = torch.randn(len(log_p), generator=torch.Generator().manual_seed(seed)).double()
    reference = log_p.detach() + 5 * noise
    loss = stock_loss(log_p, reference, torch.tensor(tokens), knobs)
    loss.backward()
    order, rows = draw.sample(range(len(pairs)), k=len(pairs)), []
    while order:
        size = draw.randint(1, len(order))
        rows.append(order[:size])
        order = order[size:]
    wide, close = replace(PACKED, pad_to_multiple_of=16), replace(TIGHT, share_prefix=True)
    collate = draw.choice([PADDED, TIGHT, PACKED, wide, close, SHARED])
    batches = [
        replace(
            collate([pairs[place] for place in row]),
            reference=reference[[2 * place + k for place in row for k in (0, 1)]],
        )
        for row in [*rows, *([[]] if collate is PACKED else [])]
    ]
    value, found, _ = take_step(engine, dpo(knobs), batches)
    assert value == pytest.approx(float(loss.detach()), abs=1e-13, rel=1e-13)
    whole = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    trained = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    far = torch.cat([(found[name] - trained[name]).flatten() for name in trained])
    assert far.norm() <= 1e-12 * whole.norm()
    assert whole.norm() > 0 or knobs.loss == "hinge", "all are behind the hinge: nothing to learn"
