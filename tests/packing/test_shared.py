"""How sequences that begin alike are laid out, as integers; what they compute is in
tests/equality/test_shared_prefixes.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.shards import TINY_MODEL
from support.shared import collators, encoded_pairs, pairs_about_one_image, questions

from vlmpack.encode import Encoder
from vlmpack.errors import PackingError
from vlmpack.packing import IGNORE_INDEX, EncodedSample, Prefix, padding_mask, slice_for_context
from vlmpack.packing.media import each_once
from vlmpack.packing.pairs import identical_pairs, sequences_of
from vlmpack.packing.prefix_rows import PrefixSegment, prefix_segments
from vlmpack.packing.prefix_tree import PrefixTree
from vlmpack.packing.row_layout import FixedShape
from vlmpack.training.step import count_seen_images


@pytest.fixture(scope="module")
def asked():
    encoder = Encoder(TINY_MODEL).replace(share_prefix=True)
    return [encoder.encode(raw.cooked()) for raw in questions()]


@pytest.fixture(scope="module")
def pairs():
    return encoded_pairs(
        Encoder(TINY_MODEL).replace(pairs=True, share_prefix=True), pairs_about_one_image()
    )


@pytest.fixture(scope="module")
def collate():
    return collators(Encoder(TINY_MODEL))


def tokens(text, *prefixes):
    """Letters as ids; a cut is (length, digest)."""
    ids = torch.tensor([ord(letter) for letter in text])
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels[-2] = ids[-1]
    return EncodedSample(
        key=text,
        input_ids=ids,
        labels=labels,
        position_ids=torch.arange(len(text))[None],
        media_positions=torch.empty(0, dtype=torch.int64),
        prefixes=tuple(Prefix(length, digest) for length, digest in prefixes),
    )


def test_neighbours_share_up_to_the_last_cut_that_both_have():
    image, prompt = (3, b"i"), (6, b"p")
    parts = [tokens("iiihowa", image, prompt), tokens("iiihowbb", image, prompt)]
    parts += [tokens("iiiwhy", image), tokens("text"), tokens("iiiwho", image)]
    assert prefix_segments(parts) == [
        PrefixSegment(-1, (0, 3), 0, 3, ends=False),
        PrefixSegment(0, (0, 2), 3, 6, ends=False),
        PrefixSegment(1, (0, 1), 6, 7, ends=True),
        PrefixSegment(1, (1, 2), 6, 8, ends=True),
        PrefixSegment(0, (2, 3), 3, 6, ends=True),
        PrefixSegment(-1, (3, 4), 0, 4, ends=True),
        PrefixSegment(-1, (4, 5), 0, 6, ends=True),
    ]
    assert len(prefix_segments([parts[0], parts[3]])) == 2, "no one shares: one stretch each"
    assert [each.stop for each in prefix_segments(parts[:2], least=7)] == [7, 8]
    assert [each.start for each in prefix_segments(parts[:3], least=4)] == [0, 6, 6, 0], "3 are few"


def test_forks_say_the_segments_of_a_sequence():
    prefix_tree = PrefixTree((-1, 0, 0, 0, 3, 3, -1), (4, 2, 2, 1, 1, 1, 9), (1, 2, 4, 5))
    assert [prefix_tree.whole(n) for n in range(4)] == [(0, 1), (0, 2), (0, 3, 4), (0, 3, 5)]
    assert (prefix_tree.num_segments, prefix_tree.num_tokens) == (6, 11)


def test_a_row_counts_its_sequences_as_each_is_alone(asked, collate):
    shared, separate = (make(asked) for make in collate)
    assert shared.lengths == separate.lengths
    assert shared.keys == separate.keys == shared.sequence_keys
    assert shared.num_tokens == separate.num_tokens
    assert shared.num_label_tokens == separate.num_label_tokens
    assert shared.num_padded_slots == separate.num_padded_slots
    assert shared.num_slots == shared.num_tokens - shared.num_shared_tokens
    assert shared.media.num_images == separate.media.num_images - 4
    assert shared.media_sources is None, "each placeholder has a feature of its own"
    assert shared.num_features == len(shared.media_positions)
    mask = padding_mask(replace(shared))
    assert not mask.any()


def test_pairs_keep_their_labels_and_counts(pairs, collate):
    shared, separate = (make(pairs) for make in collate)
    assert shared.num_pairs == separate.num_pairs == 4
    assert torch.equal(shared.label_sequences, separate.label_sequences)
    assert shared.media_sources is None
    assert separate.media_sources is not None
    assert shared.media.num_images == separate.media.num_images - 1
    labels = [batch.labels[batch.loss_mask] for batch in (shared, separate)]
    assert torch.equal(*labels)


@pytest.mark.parametrize("multiple", [1, 8])
def test_a_row_is_never_longer_than_without(multiple, asked, pairs):
    for samples in (asked, pairs):
        for count in range(1, len(samples) + 1):
            rows = [make(samples[:count]) for make in collators(Encoder(TINY_MODEL), multiple)]
            assert rows[0].num_slots <= rows[1].num_slots
            assert padding_mask(rows[0]).sum() == rows[0].num_slots - sum(rows[0].segment_tokens)


def test_images_with_a_label_behind_them_are_counted_through_forks(asked, pairs, collate):
    for samples in (asked, pairs):
        shared, separate = (make(samples) for make in collate)
        seen = count_seen_images([shared])
        assert seen == len(shared.media_positions)
        assert count_seen_images([separate]) == len(separate.media_positions)


def test_identical_answers_are_counted_through_forks(pairs, collate):
    chosen, _ = sequences_of(pairs[0])
    twice = replace(
        pairs[0],
        sequences=(chosen.length, chosen.length),
        **{
            name: torch.cat([getattr(chosen, name)] * 2, dim=-1)
            for name in ("input_ids", "labels", "position_ids")
        },
        media_positions=torch.cat([chosen.media_positions, chosen.media_positions + chosen.length]),
    )
    assert [identical_pairs(make([twice, *pairs[1:]])) for make in collate] == [(0,), (0,)]
    assert [identical_pairs(make(pairs)) for make in collate] == [(), ()]


def test_a_pair_whose_answers_share_nothing_has_its_images_once(pairs, collate):
    bare = [replace(pairs[0], prefixes=()), *pairs[1:]]
    row = collate[0](bare)
    assert row.media_sources is not None
    assert row.media.num_images == collate[1](pairs).media.num_images
    media = pairs[0].media
    images, sources = each_once([media, media, None])
    assert images.num_images == media.num_images
    assert sources.tolist() == [*range(sum(media.num_tokens))] * 2


def test_what_is_not_the_same_is_not_shared(asked, pairs, collate):
    share, _ = collate
    ids = asked[1].input_ids.clone()
    ids[0] += 1
    with pytest.raises(
        PackingError, match=r"'q0' and 'q1' have a prefix of one digest, \d+ tokens"
    ):
        share([asked[0], replace(asked[1], input_ids=ids)])
    pixels = replace(asked[1].media, pixel_values=asked[1].media.pixel_values + 1)
    with pytest.raises(PackingError, match="other tokens, positions or images"):
        share([asked[0], replace(asked[1], media=pixels)])
    labels = asked[0].labels.clone()
    labels[1] = 7
    with pytest.raises(PackingError, match="'q0': a label stands among"):
        share([replace(asked[0], labels=labels), asked[1]])


def test_forks_are_not_cut_and_have_no_fixed_shape(asked, collate):
    row = collate[0](asked)
    with pytest.raises(PackingError, match=r"context parallelism does not cut.*share_prefix"):
        slice_for_context(row, rank=0, size=2)
    fixed = replace(collate[0], fixed=FixedShape(row_tokens=4096))
    with pytest.raises(PackingError, match="rows of fixed shape share no prefixes"):
        fixed(asked)
