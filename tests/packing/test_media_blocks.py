"""Where runs of image tokens lie that attend in both directions: data of the batch, not of ids."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.samples import image_sample, text_sample

from vlmpack.errors import PackingError
from vlmpack.packing import (
    Media,
    deal_media,
    move_batch,
    pack_batch_sequences,
    pad_batch_sequences,
    padded_as_row,
)


def sample_of(key, *images, text=3, lead=0):
    """Images one after the other, each a tuple of runs, with `lead` tokens of text before."""
    counts = tuple(map(sum, images))
    total = sum(counts)
    made = text_sample(key, [20] * lead + [9] * total + [21] * text)
    media = Media(
        pixel_values=torch.zeros(total * 4, 6),
        grid_thw=tuple((1, 4, count) for count in counts),
        num_tokens=counts,
        blocks=images,
    )
    return replace(made, media=media, media_positions=torch.arange(total) + lead)


ROW = [
    sample_of("a", (4,), (4,), lead=1),
    text_sample("b", range(20, 25)),
    sample_of("c", (2, 3), text=2),
]


def test_blocks_of_a_row_in_samples_order():
    """Images that touch, and runs of one image that touch, stay blocks of their own."""
    batch = pack_batch_sequences(ROW, pad_token_id=0)
    assert batch.image_blocks == ((1, 5), (5, 9), (17, 19), (19, 22))
    aligned = pack_batch_sequences(ROW, pad_token_id=0, pad_to_multiple_of=8, total_multiple_of=64)
    assert aligned.image_blocks == ((1, 5), (5, 9), (24, 26), (26, 29))
    for row in (batch, aligned):
        slots = [slot for a, b in row.image_blocks for slot in range(a, b)]
        assert slots == row.media_positions.tolist()
        assert all(isinstance(slot, int) for span in row.image_blocks for slot in span)


def test_blocks_of_padded_rows():
    batch = pad_batch_sequences(ROW, pad_token_id=0, pad_to_multiple_of=8)
    assert batch.image_blocks == ((1, 5), (5, 9), (32, 34), (34, 37))
    assert padded_as_row(batch).image_blocks == batch.image_blocks


def test_ids_decide_nothing():
    other = [replace(sample, input_ids=torch.zeros_like(sample.input_ids)) for sample in ROW]
    batch = pack_batch_sequences(other, pad_token_id=0)
    assert batch.image_blocks == pack_batch_sequences(ROW, pad_token_id=9).image_blocks


def test_blocks_stay_on_the_host():
    batch = pack_batch_sequences(ROW, pad_token_id=0)
    moved = move_batch(batch, torch.device("meta"))
    assert moved.input_ids.is_meta
    assert moved.image_blocks == batch.image_blocks


def test_families_without_blocks_have_none():
    samples = [image_sample("x", axes=1), text_sample("y", range(5))]
    assert pack_batch_sequences(samples, pad_token_id=0).image_blocks == ()
    assert pad_batch_sequences(samples, pad_token_id=0).image_blocks == ()


def test_images_that_are_shared_out_keep_their_blocks():
    batch = pack_batch_sequences(ROW, pad_token_id=0)
    shares = [deal_media(batch, rank=rank, size=2).media.blocks for rank in range(2)]
    assert sorted(run for share in shares for run in share) == [(2, 3), (4,), (4,)]


def test_a_run_with_a_hole_is_refused():
    sample = sample_of("a", (4,))
    positions = torch.tensor([0, 1, 3, 4])
    with pytest.raises(PackingError, match="a run of 4 image tokens lies in slots 0 to 4"):
        pack_batch_sequences([replace(sample, media_positions=positions)], pad_token_id=0)


def test_blocks_must_sum_to_the_tokens():
    sample = sample_of("a", (4,))
    media = replace(sample.media, blocks=((2, 1),))
    with pytest.raises(PackingError, match=r"'a': its images' blocks \(\(2, 1\),\) do not sum"):
        pack_batch_sequences([replace(sample, media=media)], pad_token_id=0)
