"""Images shared out over ranks: each exactly once, and features come back in image order."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch
from support.samples import image_sample, text_sample

from vlmpack.packing import deal_media, pack_batch_sequences
from vlmpack.packing.image_owners import assign_images


def row_of(grids):
    """A row with images of these grids, and a text-only sample in between."""
    samples = [text_sample("text", [5, 6, 7], axes=3)]
    samples += [image_sample("i" * (n + 1), grid=grid) for n, grid in enumerate(grids)]
    return pack_batch_sequences(samples, pad_token_id=0)


def random_grids(draw, count):
    return [(1, 2 * draw.randint(1, 6), 2 * draw.randint(1, 6)) for _ in range(count)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_each_image_goes_to_one_rank(size):
    draw = random.Random(size)
    for count in (0, 1, 2, 5, 17):
        grids = random_grids(draw, count)
        by_rank = assign_images(grids, size)
        assert len(by_rank) == size
        assert sorted(number for mine in by_rank for number in mine) == list(range(count))
        assert all(mine == sorted(mine) for mine in by_rank)
        assert by_rank == assign_images(tuple(grids), size), "ranks would disagree"


def test_patches_are_spread_evenly():
    draw = random.Random(0)
    grids = random_grids(draw, 64)
    loads = [sum(prod(grids[n]) for n in mine) for mine in assign_images(grids, 4)]
    assert max(loads) - min(loads) <= max(map(prod, grids))
    assert max(loads) < 1.1 * sum(loads) / 4


def test_ties_are_broken_by_number_and_rank():
    assert assign_images([(1, 2, 2)] * 5, 2) == [[0, 2, 4], [1, 3]]
    assert assign_images([(1, 2, 2), (1, 4, 4)], 4) == [[1], [0], [], []]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 6])
def test_order_restores_the_image_order(size, count):
    """Features are simulated: each is the pixel row of its first patch and a running number."""
    draw = random.Random(count)
    row = row_of(random_grids(draw, count))
    media = row.media
    ends = torch.tensor([prod(grid) for grid in media.grid_thw]).cumsum(0).tolist()

    def features(part, first_numbers):
        """(m, 2): (pixel value of the image, number of the feature within the row)."""
        found, patch = [], 0
        for grid, count, number in zip(part.grid_thw, part.num_tokens, first_numbers, strict=True):
            value = float(part.pixel_values[patch, 0])
            found += [[value, number + k] for k in range(count)]
            patch += prod(grid)
        return found

    firsts = [sum(media.num_tokens[:n]) for n in range(count)]
    whole = torch.tensor(features(media, firsts))
    shares = [deal_media(row, rank=rank, size=size) for rank in range(size)]
    by_rank = assign_images(media.grid_thw, size)
    counts = shares[0].media_part.counts
    gathered = []
    for share, mine in zip(shares, by_rank, strict=True):
        assert share.media_part.counts == counts
        assert torch.equal(share.media_part.order, shares[0].media_part.order)
        assert (share.media is None) == (not mine)
        found = features(share.media, [firsts[n] for n in mine]) if mine else []
        padding = [[-1.0, -1.0]] * (max(counts) - len(found))
        gathered += found + padding
        if mine:
            starts = [0, *ends]
            pixels = [media.pixel_values[starts[n] : ends[n]] for n in mine]
            assert torch.equal(share.media.pixel_values, torch.cat(pixels))
    assert torch.equal(torch.tensor(gathered)[shares[0].media_part.order], whole)
    assert sum(counts) == row.media_positions.shape[0]


def test_the_rest_of_the_row_is_untouched():
    row = row_of([(1, 4, 4), (1, 2, 4)])
    share = deal_media(row, rank=1, size=2)
    assert share.media.num_images == 1
    for field in ("input_ids", "labels", "position_ids", "media_positions", "keys", "lengths"):
        assert getattr(share, field) is getattr(row, field)


def test_a_row_without_images_is_returned_as_it_is():
    row = row_of([])
    assert row.media is None
    assert deal_media(row, rank=1, size=4) is row


def test_ranks_beyond_the_images_have_none():
    row = row_of([(1, 4, 4)])
    shares = [deal_media(row, rank=rank, size=4) for rank in range(4)]
    assert [share.media is None for share in shares] == [False, True, True, True]
    assert shares[3].media_part.counts == (4, 0, 0, 0)
