"""A pair in a row is its two sequences, each as it is alone, and its images once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.pairs import cooked_pair, raw_pairs
from support.shards import TINY_MODEL

from vlmpack.encode import Encoder
from vlmpack.errors import PackingError
from vlmpack.packing import PackCollator, PadCollator
from vlmpack.packing.context import slice_for_context
from vlmpack.packing.pairs import identical_pairs, sequences_of
from vlmpack.proof.rows.checks import check_row
from vlmpack.proof.rows.row import Row, RowRules


@pytest.fixture(scope="module")
def pair_encoder():
    return Encoder(TINY_MODEL).replace(pairs=True)


@pytest.fixture(scope="module")
def pairs(pair_encoder):
    return [pair_encoder.encode(cooked_pair(*pair)) for pair in raw_pairs()]


@pytest.fixture(scope="module")
def alone(encoder):
    """Each sequence of the pairs, encoded by itself as a conversation of its own."""
    return [encoder.encode(raw.cooked()) for pair in raw_pairs() for raw in pair]


PACKED = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8)
PADDED = PadCollator(pad_token_id=561, num_position_axes=3)


def row_of(batch, alone, encoder, multiple):
    from vlmpack.alignment import Alignment

    return Row(
        batch=batch,
        alone=tuple(alone),
        rules=RowRules(
            context=1,
            multiples=Alignment(multiple, 1),
            placeholder_ids=encoder.placeholder_ids,
            pad_token_id=561,
        ),
        planned=batch.keys,
        positions=tuple(item.position_ids for item in alone),
        sequences=2,
    )


def faults(row):
    return [check.name for check in check_row(row) if check.status != "pass"]


@pytest.mark.parametrize(("collate", "multiple"), [(PACKED, 8), (PADDED, 1)])
def test_a_row_of_pairs_holds_each_sequence_as_it_is_alone(
    collate, multiple, pairs, alone, pair_encoder
):
    batch = collate(pairs)
    assert len(batch.keys) == 6
    assert batch.num_pairs == 6
    assert batch.lengths == tuple(item.length for item in alone)
    assert batch.sequence_keys == tuple(item.key for item in alone)
    assert faults(row_of(batch, alone, pair_encoder, multiple)) == []
    counts = [int((item.labels != -100).sum()) for item in alone]
    assert torch.bincount(batch.label_sequences).tolist() == counts
    assert batch.media.num_images == 7, "each image once"
    assert len(batch.media_positions) == 2 * sum(batch.media.num_tokens)


@pytest.mark.parametrize("collate", [PACKED, PADDED])
def test_wrong_rows_of_pairs_are_found(collate, pairs, alone, pair_encoder):
    batch, multiple = collate(pairs), 8 if collate is PACKED else 1
    sources = batch.media_sources
    swapped = replace(batch, media_sources=sources.roll(sum(pairs[0].media.num_tokens)))
    assert faults(row_of(swapped, alone, pair_encoder, multiple)) == ["pixels in order"]
    identity = replace(batch, media_sources=None)
    assert faults(row_of(identity, alone, pair_encoder, multiple)) == ["pixels in order"]
    turned = [alone[place ^ 1] for place in range(len(alone))]
    assert "samples" in faults(row_of(batch, turned, pair_encoder, multiple))
    going_on = replace(batch, position_ids=batch.position_ids + 1)
    assert faults(row_of(going_on, alone, pair_encoder, multiple)) == ["positions"]


def test_a_pair_comes_apart_into_what_it_was_made_of(pairs, alone):
    parts = [part for pair in pairs for part in sequences_of(pair)]
    for part, own in zip(parts, alone, strict=True):
        assert part.key == own.key
        for name in ("input_ids", "labels", "position_ids", "media_positions"):
            assert torch.equal(getattr(part, name), getattr(own, name)), name
        if own.media is not None:
            assert torch.equal(part.media.pixel_values, own.media.pixel_values)
    assert parts[0].media is parts[1].media


def test_the_length_is_known_before_a_pixel_is_decoded(pair_encoder, pairs):
    for raw, pair in zip(raw_pairs(), pairs, strict=True):
        bare = replace(cooked_pair(*raw), images=())
        length = pair_encoder.length(bare, raw[0].sizes)
        assert length.num_tokens == pair.length
        assert length.num_chosen_tokens == pair.sequences[0]
        assert length.num_label_tokens == int((pair.labels != -100).sum())
        assert length.num_image_tokens == len(pair.media_positions)
        patches = 0 if pair.media is None else pair.media.pixel_values.shape[0]
        assert length.num_patches == patches, "encoded once"


def test_answers_that_are_the_same_are_counted(pair_encoder, pairs):
    chosen, rejected = raw_pairs()[0]
    same = pair_encoder.encode(cooked_pair(chosen, replace(rejected, messages=chosen.messages)))
    for collate in (PACKED, PADDED):
        assert identical_pairs(collate(pairs)) == ()
        assert identical_pairs(collate([*pairs[:2], same, *pairs[2:]])) == (2,)
        assert identical_pairs(collate.empty()) == ()


def test_what_is_no_pair_does_not_share_a_row_with_pairs(pairs, alone):
    with pytest.raises(PackingError, match="'pair0' is a pair and sample 'pair1' is none"):
        PACKED([pairs[0], alone[2]])
    with pytest.raises(PackingError, match="expected two that sum to"):
        PACKED([replace(pairs[0], sequences=(1, 2))])
    unshifted = pairs[1].labels.clone()
    unshifted[pairs[1].sequences[0] - 1] = 7
    with pytest.raises(PackingError, match="the last label is 7"):
        PACKED([replace(pairs[1], labels=unshifted)])


def test_a_slice_of_a_row_knows_the_sequence_of_each_label(pairs):
    row = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=4)(pairs)
    found = []
    for rank in range(2):
        part = slice_for_context(row, rank=rank, size=2)
        slots = part.context.row_index[part.context.label_positions].tolist()
        found += zip(slots, part.own_part(row.label_sequences).tolist(), strict=True)
    wanted = zip(row.label_positions.tolist(), row.label_sequences.tolist(), strict=True)
    assert sorted(found) == sorted(wanted)
    empty = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=4)([])
    assert slice_for_context(empty, rank=1, size=2).context.label_places.shape == (0,)
