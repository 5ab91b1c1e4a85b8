"""Rows of pairs held to what no loss can show: who reaches whom, what stands where, what is masked.

The same model in double as in `test_preference.py`, which compares losses and gradients with the
stock model's.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from support.doubles import stock_double, stock_log_p, use_double
from support.engines import make_engine, take_step, worst
from support.pairs import cooked_pair, raw_pairs
from support.shards import TINY_MODEL, RawSample, read_shard

from vlmpack.backends.cross_entropy import linear_cross_entropy
from vlmpack.encode import Encoder
from vlmpack.packing import PackCollator, PackedBatch, PadCollator
from vlmpack.packing.pairs import sequences_of
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.training.preference import dpo, sequence_log_probabilities
from vlmpack.training.reference import log_probabilities

COLLATORS = {
    f"alignment {multiple}": PackCollator(
        pad_token_id=561, num_position_axes=3, pad_to_multiple_of=multiple
    )
    for multiple in (1, 8, 16)
} | {"padded": PadCollator(pad_token_id=561, num_position_axes=3)}
PACKED = COLLATORS["alignment 8"]
DPO = ObjectiveSection(name="dpo", beta=0.2, sft_weight=0.3)


@pytest.fixture(scope="module")
def pair_encoder():
    return Encoder(TINY_MODEL).replace(pairs=True)


@pytest.fixture(scope="module")
def pairs(pair_encoder):
    """Six pairs on 2, 0, 1, 3, 0 and 1 images."""
    return [pair_encoder.encode(cooked_pair(*pair)) for pair in raw_pairs()]


@pytest.fixture(scope="module")
def engine(pair_encoder):
    with pytest.MonkeyPatch.context() as patch:
        use_double(patch.setattr)
        made = make_engine(TINY_MODEL, pair_encoder)
        made.vlm.double()
        yield made


def with_reference(batch, seed=0):
    noise = torch.randn(len(batch.lengths), generator=torch.Generator().manual_seed(seed))
    return replace(batch, reference=noise.double() * 5 - 60)


def gradients(engine, batch):
    """By name, of one step on a row; the weights stay."""
    return take_step(engine, dpo(DPO), [batch])[1]


def log_p_of(engine, batch):
    """(N,) with a graph behind it."""
    losses = engine.vlm(batch, batch.packed_seq_params())
    return sequence_log_probabilities(losses, batch)


def starts_of(batch):
    """The first slot of each sequence."""
    if isinstance(batch, PackedBatch):
        return [0, *accumulate(batch.segment_lengths)][: len(batch.lengths)]
    return [row * batch.input_ids.shape[1] for row in range(len(batch.lengths))]


# Isolation


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["alignment 1", "padded"])
def test_pixels_and_embeddings_reach_their_own_pair_alone(layout, engine, pairs):
    """The gradient of each log p, of every sequence: exactly 0 wherever it may not come from."""
    batch = COLLATORS[layout](pairs[:4])
    pixels = batch.media.pixel_values.double().requires_grad_()
    batch = replace(batch, media=replace(batch.media, pixel_values=pixels))
    entered = []

    def keep(_module, args, given):
        given["inputs_embeds"].retain_grad()
        entered.append(given["inputs_embeds"])

    with engine.vlm.language.register_forward_pre_hook(keep, with_kwargs=True):
        log_p = log_p_of(engine, batch)
    counts = [p.media.pixel_values.shape[0] if p.media else 0 for p in pairs[:4]]
    rows = [0, *accumulate(counts)]
    for sequence in range(8):
        pixels.grad = entered[0].grad = None
        log_p[sequence].backward(retain_graph=True)
        touched = pixels.grad.abs().sum(dim=1).nonzero()[:, 0].tolist()
        pair = sequence // 2
        assert touched == [*range(rows[pair], rows[pair + 1])]
        slots = entered[0].grad.flatten(0, -2).abs().sum(dim=1).nonzero()[:, 0].tolist()
        start = starts_of(batch)[sequence]
        assert slots, "something is learnt"
        assert start == slots[0] and slots[-1] < start + batch.lengths[sequence]
    engine.zero_gradients()


@pytest.mark.cases(slow="ids")
@pytest.mark.parametrize("changed", ["ids", "positions"])
def test_the_other_answer_of_a_pair_changes_no_bit_of_one(changed, engine, pairs):
    """Both ways, in padded rows too; what changed does change its own."""
    for layout in ("alignment 16", "padded"):
        batch = COLLATORS[layout](pairs[2:4])
        before, starts = log_probabilities(engine, batch), starts_of(batch)
        for sequence in range(4):
            ids, positions = batch.input_ids.clone(), batch.position_ids.clone()
            last = starts[sequence] + batch.lengths[sequence] - 3
            if changed == "ids":
                ids.view(-1)[last] = (ids.view(-1)[last] + 1) % 500 + 20
            else:
                positions.view(3, -1)[:, last] += 2
            other = replace(batch, input_ids=ids, position_ids=positions)
            after = log_probabilities(engine, other)
            assert [n for n in range(4) if after[n] != before[n]] == [sequence]


# What stands where


def taken_apart(batch, pair_lengths):
    """(ids, labels, positions, patches) of each sequence, by lengths alone.

    Args:
        batch: a row of pairs.
        pair_lengths: (chosen, rejected) of each pair, as they are alone.
    """
    found = []
    flat = (batch.input_ids.flatten(), batch.labels.flatten(), batch.position_ids.flatten(1))
    lengths = [length for both in pair_lengths for length in both]
    for start, length in zip(starts_of(batch), lengths, strict=True):
        ids, labels, positions = (tensor[..., start : start + length] for tensor in flat)
        patches = []
        places = batch.media_positions.tolist()
        for place, source in zip(places, _sources(batch), strict=True):
            if start <= place < start + length:
                patches.append(batch.media.pixel_values[4 * source : 4 * source + 4])
        found.append((ids, labels, positions, torch.cat(patches) if patches else None))
    return found


def _sources(batch):
    return [] if batch.media_sources is None else batch.media_sources.tolist()


def differences(found, wanted):
    """Where two lists of tensors, some None, are not the same."""
    return [
        place
        for place, (a, b) in enumerate(zip(found, wanted, strict=True))
        if (a is None) != (b is None) or (a is not None and not torch.equal(a, b))
    ]


@pytest.mark.parametrize("layout", COLLATORS)
def test_a_row_comes_apart_into_the_sequences_that_went_in(layout, pairs, encoder):
    """Ids, labels, positions, boundaries and pixel rows, each encoded alone as a conversation."""
    order = random.Random(layout).sample(range(6), 6)
    batch = COLLATORS[layout]([pairs[place] for place in order])
    alone = [encoder.encode(raw.cooked()) for place in order for raw in raw_pairs()[place]]
    lengths = [(a.length, b.length) for a, b in zip(alone[::2], alone[1::2], strict=True)]
    parts = taken_apart(batch, lengths)
    for part, own in zip(parts, alone, strict=True):
        pixels = own.media.pixel_values if own.media else None
        wanted = (own.input_ids, own.labels, own.position_ids, pixels)
        assert differences(part, wanted) == []
    if isinstance(batch, PackedBatch):
        multiple = PACKED.pad_to_multiple_of if layout == "alignment 8" else int(layout.split()[1])
        ends = list(accumulate(own.length for own in alone))
        assert batch.cu_seqlens.tolist() == [0, *ends]
        up = [-(-own.length // multiple) * multiple for own in alone]
        physical = batch.packed_seq_params().cu_seqlens_physical.tolist()
        assert physical == [0, *accumulate(up)]
    assert int(batch.loss_mask.sum()) == sum(int((own.labels != -100).sum()) for own in alone)
    going_on = replace(batch, position_ids=batch.position_ids + 1)
    assert all(
        differences(part, (own.input_ids, own.labels, own.position_ids, part[3])) == [2]
        for part, own in zip(taken_apart(going_on, lengths), alone, strict=True)
    )


# Towers


def tower_a_sequence(batch, pairs):
    """The same row where each answer has images of its own, as trainers without pairs have it."""
    parts = [part for pair in pairs for part in sequences_of(pair) if part.media is not None]
    media = replace(
        batch.media,
        pixel_values=torch.cat([part.media.pixel_values for part in parts]),
        grid_thw=tuple(grid for part in parts for grid in part.media.grid_thw),
        num_tokens=tuple(count for part in parts for count in part.media.num_tokens),
    )
    return replace(batch, media=media, media_sources=None)


@pytest.mark.slow
def test_images_encoded_once_a_pair_train_what_they_train_encoded_twice(engine, pairs):
    batch = with_reference(PACKED(pairs))
    twice = tower_a_sequence(batch, pairs)
    assert twice.media.num_images == 2 * batch.media.num_images == 14
    once, wanted = log_probabilities(engine, batch), log_probabilities(engine, twice)
    assert once == pytest.approx(wanted, abs=1e-11, rel=0)
    assert worst(gradients(engine, batch), gradients(engine, twice)) < 1e-12


# Masks


def poisoned(engine, batch):
    """A hook that makes the final hidden states of all slots without a label NaN."""
    dead = ~batch.loss_mask.flatten()

    def spoil(_module, _args, output):
        hidden = output.last_hidden_state
        spoilt = hidden.masked_fill(dead.view(*hidden.shape[:-1], 1), float("nan"))
        output.last_hidden_state = spoilt
        return output

    return engine.vlm.language.register_forward_hook(spoil)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["alignment 16", "padded"])
def test_a_slot_without_a_label_may_be_nan(layout, engine, pairs):
    """Label tokens are selected before anything is computed of them; a mask that multiplies
    spreads the NaN."""
    batch = with_reference(COLLATORS[layout](pairs[:3]))
    assert batch.num_slots > batch.num_tokens, "padding is there"
    wanted = gradients(engine, batch)
    before = log_probabilities(engine, batch)
    with poisoned(engine, batch):
        assert log_probabilities(engine, batch) == before
        found = gradients(engine, batch)
        hidden = engine.vlm.hidden_states(batch, batch.packed_seq_params())
        targets = batch.labels.flatten().clamp(min=0)
        losses = linear_cross_entropy(hidden, engine.vlm.head.weight, targets)
    assert worst(found, wanted) == 0.0
    multiplied = (losses * batch.loss_mask.flatten()).sum()
    assert multiplied.isnan(), "the control"


# What is wrong


def images_in_another_order(batch):
    """The images of two pairs swapped, with their grids, as where a collator sorts them."""
    media = batch.media
    counts = [t * h * w for t, h, w in media.grid_thw]
    pieces = [*media.pixel_values.split(counts)]
    order = [2, 1, 0]
    moved = replace(
        media,
        pixel_values=torch.cat([pieces[place] for place in order]),
        grid_thw=tuple(media.grid_thw[place] for place in order),
        num_tokens=tuple(media.num_tokens[place] for place in order),
    )
    return replace(batch, media=moved)


def pair_split_over_packs(batch):
    """Sequences that were packed one by one: the two that stand together are of two pairs."""
    places = torch.tensor([0, 2, 1, 3, 4, 5])
    return replace(
        batch,
        label_sequences=places[batch.label_sequences],
        reference=batch.reference[places.argsort()],
    )


def labels_of_the_prompt(batch):
    """Answers of which the prompt's tokens are taken for a part."""
    labels = batch.labels.clone()
    for start in starts_of(batch):
        labels[0, start : start + 4] = batch.input_ids[0, start + 1 : start + 5]
    mask = labels != -100
    slots = torch.tensor(starts_of(batch))
    places = mask.flatten().nonzero()[:, 0]
    owners = torch.searchsorted(slots, places, right=True) - 1
    return replace(
        batch, labels=labels, loss_mask=mask, label_positions=places, label_sequences=owners
    )


@pytest.mark.cases(quick="labels_of_the_prompt", slow="pair_split_over_packs")
@pytest.mark.parametrize(
    "wrong", [images_in_another_order, pair_split_over_packs, labels_of_the_prompt]
)
def test_a_row_that_is_wrong_has_other_gradients(wrong, engine, pairs):
    batch = with_reference(PACKED(pairs[:3]))
    assert batch.media.num_images == 3
    wanted, found = gradients(engine, batch), gradients(engine, wrong(batch))
    far = torch.cat([(found[name] - wanted[name]).flatten() for name in wanted]).norm()
    assert far / torch.cat([g.flatten() for g in wanted.values()]).norm() > 0.01


# Pairs at the edges


def test_a_prompt_of_an_image_alone_beside_a_text_and_answers_of_a_letter(engine, pair_encoder):
    """A row and each by itself, against the stock model; the empty row has no part."""
    shown = next(sample for sample in read_shard() if len(sample.images) == 1)
    said = [
        {"role": "assistant", "content": [{"type": "text", "text": text}]} for text in ("a", "b")
    ]
    image = {"role": "user", "content": [{"type": "image", "image": "0.jpg"}]}
    text = {"role": "user", "content": [{"type": "text", "text": "?"}]}
    raw = [
        tuple(RawSample(key, [turn, answer], images) for answer in said)
        for key, turn, images in (("image", image, shown.images), ("text", text, ()))
    ]
    pairs = [pair_encoder.encode(cooked_pair(*pair)) for pair in raw]
    wanted = stock_log_p(stock_double(), pair_encoder, pairs).tolist()
    for layout, collate in COLLATORS.items():
        rows = [collate(pairs), *(collate([pair]) for pair in pairs)]
        found = [log_probabilities(engine, row) for row in rows]
        assert found[0] == pytest.approx(wanted, abs=1e-11, rel=0), layout
        assert found[1] + found[2] == pytest.approx(wanted, abs=1e-11, rel=0), layout
        assert log_probabilities(engine, collate.empty()) == []
