"""Pixels that travel as uint8 levels are the same float32 behind the way, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.samples import text_sample

from vlmpack.packing import Media, move_batch, pack_batch_sequences
from vlmpack.packing.image_owners import select_images
from vlmpack.packing.media import LevelScale, as_levels, concatenate_media, move_media, pixels_of

MEAN, STD = torch.tensor([0.48, 0.45, 0.40]), torch.tensor([0.26, 0.27, 0.21])
CHANNEL = torch.arange(12) // 4
"""Of each column: four numbers of each of three channels."""


def pixels_of_levels(levels):
    """(P, 12) float32 as an image processor would: rescaled, then normalised."""
    return (levels.float() * (1 / 255) - MEAN[CHANNEL]) / STD[CHANNEL]


def drawn(rows, seed=0):
    return torch.randint(0, 256, (rows, 12), generator=torch.Generator().manual_seed(seed))


def scale():
    return LevelScale(*(pixels_of_levels(torch.full((2, 12), end)) for end in (0, 255)))


def media_of_levels(*levels):
    parts = [
        Media(
            pixel_values=pixels_of_levels(each),
            grid_thw=((1, 2, len(each) // 2),),
            num_tokens=(len(each) // 4,),
        )
        for each in levels
    ]
    return concatenate_media(parts)


def row_of(media):
    sample = text_sample("a", [9] * 6 + [20, 21])
    count = sum(media.num_tokens)
    return pack_batch_sequences(
        [
            replace(sample, media=media, media_positions=torch.arange(count)),
            text_sample("b", [5, 6]),
        ],
        pad_token_id=0,
    )


def bits(tensor):
    return tensor.view(torch.int32)


def test_levels_are_those_of_the_image_and_give_its_pixels_back():
    levels = drawn(9000)
    pixels = pixels_of_levels(levels)
    found = scale().levels_of(pixels)
    assert found is not None
    assert found[0].dtype == torch.uint8
    assert torch.equal(found[0].long(), levels)
    media = Media(
        pixel_values=found[0], grid_thw=((1, 90, 100),), num_tokens=(2250,), table=found[1]
    )
    assert torch.equal(bits(pixels_of(media, torch.float32)), bits(pixels))
    assert torch.equal(pixels_of(media, torch.bfloat16), pixels.bfloat16())


def test_a_later_row_has_levels_that_an_earlier_one_had_not():
    one = scale()
    few, many = pixels_of_levels(drawn(4) % 7), pixels_of_levels(drawn(500, seed=1))
    for pixels in (few, many, few):
        found = one.levels_of(pixels)
        assert found is not None
        again = Media(pixel_values=found[0], grid_thw=(), num_tokens=(), table=found[1])
        assert torch.equal(bits(pixels_of(again, torch.float32)), bits(pixels))


@pytest.mark.parametrize(
    "change",
    [
        lambda pixels: pixels[3].add_(1e-3),
        lambda pixels: pixels[0, 0].fill_(torch.nan),
        lambda pixels: pixels[5].mul_(1e6),
        lambda pixels: pixels[7, 2].nextafter_(torch.tensor(9.0)),
    ],
    ids=["between two levels", "nan", "far out", "one bit"],
)
def test_a_row_that_is_not_given_back_bit_for_bit_stays_as_it_is(change):
    one, pixels = scale(), pixels_of_levels(drawn(2000))
    changed = pixels.clone()
    change(changed)
    assert one.levels_of(changed) is None
    found = one.levels_of(pixels)
    assert found is not None, "a row spoiled the table for the rows behind it"
    again = Media(pixel_values=found[0], grid_thw=(), num_tokens=(), table=found[1])
    assert torch.equal(bits(pixels_of(again, torch.float32)), bits(pixels))


def test_a_row_with_a_level_seen_once_alone_may_be_any_value_there():
    """One pixel of its level: the table takes what it is, so that it is given back all the same."""
    pixels = pixels_of_levels(torch.full((1, 12), 7))
    pixels[0, 0] += 1e-4
    assert scale().levels_of(pixels) is None, "columns of one channel share a table"
    pixels[0, :4] = pixels[0, 0]
    assert scale().levels_of(pixels) is not None


@pytest.mark.parametrize(
    ("black", "white", "said"),
    [
        (torch.zeros(2, 3), torch.eye(2, 3), "not all the same"),
        (torch.zeros(2, 3), torch.zeros(2, 3), "not above black"),
    ],
)
def test_rows_that_are_no_levels_of_one_channel_each_are_refused(black, white, said):
    with pytest.raises(ValueError, match=said):
        LevelScale(black, white)


def test_a_row_moves_as_levels_and_stands_on_the_device_as_pixels():
    media = media_of_levels(drawn(16), drawn(8, seed=1))
    row = row_of(media)
    sent = as_levels(row, scale())
    assert sent.media.pixel_values.dtype == torch.uint8
    assert as_levels(sent, scale()) is sent, "levels of levels"
    moved = move_media(
        move_batch(sent, torch.device("cpu")).media, torch.device("cpu"), torch.float32
    )
    assert moved.table is None
    assert torch.equal(bits(moved.pixel_values), bits(media.pixel_values))
    none = pack_batch_sequences([text_sample("b", [5, 6])] * 2, pad_token_id=0)
    assert as_levels(none, scale()) is none


def test_images_are_chosen_from_levels_and_joined_as_pixels():
    media = media_of_levels(drawn(16), drawn(8, seed=1))
    sent = as_levels(row_of(media), scale()).media
    second = select_images(sent, [1])
    assert torch.equal(bits(pixels_of(second, torch.float32)), bits(media.pixel_values[16:]))
    joined = concatenate_media([sent, media])
    assert torch.equal(bits(joined.pixel_values), bits(media.pixel_values.repeat(2, 1)))
