"""Who makes the pixels of which image: known to all before any image is read."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support.samples import image_sample

from vlmpack.errors import PackingError
from vlmpack.packing import deal_media, pack_batch_sequences
from vlmpack.packing.batch import ImageOwners
from vlmpack.packing.image_owners import RowOwners, SampleOwners, join_owners, turns_of

Row = list[list[int]]
"""Patches of each image of each sample."""


def owners_of(row: Row, size: int, *, turn: int = 0, planned: Row | None = None) -> list[list[int]]:
    """The owner of each image; the samples that are still there by the plan of all."""
    planned = row if planned is None else planned
    total, before, found = sum(map(sum, planned)), 0, []
    for sample in planned:
        if sample in row:
            share = SampleOwners(RowOwners(0, size, turn), before, total)
            found.append(list(share.owners(sample).ranks))
        before += sum(sample)
    return found


def random_row(draw: random.Random) -> Row:
    return [
        [draw.randint(4, 1024) for _ in range(draw.choice([0, 1, 1, 2, 3]))]
        for _ in range(draw.randint(1, 8))
    ]


def loads_of(row: Row, size: int, turn: int = 0) -> list[int]:
    loads = [0] * size
    for sample, owners in zip(row, owners_of(row, size, turn=turn), strict=True):
        for patches, owner in zip(sample, owners, strict=True):
            loads[owner] += patches
    return loads


def test_the_example_of_the_module() -> None:
    assert owners_of([[64, 64], [128], [32, 32]], 2) == [[0, 0], [1], [1, 1]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_no_process_has_more_than_its_part_and_one_image(size: int) -> None:
    draw = random.Random(size)
    for _ in range(200):
        row = random_row(draw)
        largest = max((n for sample in row for n in sample), default=0)
        loads = loads_of(row, size, draw.randrange(size))
        assert sum(loads) == sum(map(sum, row)) and len(loads) == size
        assert max(loads) <= sum(loads) / size + largest


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_equal_images_are_dealt_out_evenly(count: int) -> None:
    loads = loads_of([[16]] * count, 4)
    assert max(loads) == 16 * -(-count // 4)


def test_a_hole_keeps_its_place() -> None:
    """Who could read the sample and who could not know the same owners of the others."""
    draw = random.Random(0)
    for _ in range(100):
        row = [sample or [7] for sample in random_row(draw)]
        row = [[n + 2000 * place for n in sample] for place, sample in enumerate(row)]  # all differ
        whole = owners_of(row, 4)
        for hole in range(len(row)):
            left = row[:hole] + row[hole + 1 :]
            assert owners_of(left, 4, planned=row) == whole[:hole] + whole[hole + 1 :]
    moved = owners_of([[9], [9]], 2) != owners_of([[9], [9], [9]], 2)[1:]
    assert moved, "owners by what is left would differ, and this test could not see it"


def test_rows_take_turns() -> None:
    """Over a step a process holds at most its part of all rows and one more; exact where rows are
    alike, as those of one image are, which lie in the same part of the line always."""
    draw = random.Random(1)
    for _ in range(300):
        size, rows = (
            draw.choice([2, 4, 8]),
            [draw.randint(1, 4000) for _ in range(draw.randint(1, 20))],
        )
        by_turns, by_none = [0] * size, [0] * size
        for patches, turn in zip(rows, turns_of(rows, size), strict=True):
            by_turns = [
                a + b for a, b in zip(by_turns, loads_of([[patches]], size, turn), strict=True)
            ]
            by_none = [a + b for a, b in zip(by_none, loads_of([[patches]], size), strict=True)]
        assert max(by_turns) <= sum(rows) / size + max(rows)
        assert max(by_none) == sum(rows), "without turns one process has them all"


def row_of(rank: int | None, *, held: bool = True):
    """Two samples of one image each, of processes 0 and 1; with the pixels of one of them."""
    samples = []
    for owner, name in enumerate("ab"):
        sample = image_sample(name, grid=(1, 4, 2 * owner + 2))
        media = sample.media
        owners = ImageOwners((owner,), rank, 2)
        rows = media.pixel_values if owner == rank or not held else media.pixel_values[:0]
        samples.append(replace(sample, media=replace(media, pixel_values=rows, owners=owners)))
    return pack_batch_sequences(samples, pad_token_id=0)


def test_a_row_holds_the_pixels_of_its_process() -> None:
    both = [image_sample(name, grid=(1, 4, 2 * n + 2)) for n, name in enumerate("ab")]
    for rank in range(2):
        row = row_of(rank)
        assert row.media.patches_here == [8 * (rank == 0), 16 * (rank == 1)]
        share = deal_media(row, rank=rank, size=2)
        assert torch.equal(share.media.pixel_values, both[rank].media.pixel_values)
        assert share.media.pixel_values is row.media.pixel_values, "nothing is copied"
        assert share.media.grid_thw == both[rank].media.grid_thw
        whole = deal_media(pack_batch_sequences(both, pad_token_id=0), rank=rank, size=2)
        assert sum(share.media_part.counts) == sum(whole.media_part.counts)
        assert sorted(share.media_part.order.tolist()) == sorted(
            set(share.media_part.order.tolist())
        )
    assert row_of(None).media.pixel_values.shape[0] == 0


def test_pixels_of_another_process_are_refused() -> None:
    with pytest.raises(PackingError, match=r"pixels of process 1 of 2 .* expected those of 0 of 2"):
        deal_media(row_of(1), rank=0, size=2)
    with pytest.raises(PackingError, match="hold 8 patches of 1 images"):
        row_of(1, held=False)
    with pytest.raises(ValueError, match="images of several processes"):
        join_owners([ImageOwners((0,), 0, 2), ImageOwners((1,), 1, 2)])
    with pytest.raises(ValueError, match="images of several processes"):
        join_owners([ImageOwners((0,), 0, 2), None])
