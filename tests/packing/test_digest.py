"""The digest by which the processes of a replica agree on a row: every field of it counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from support.samples import image_sample, text_sample
from torch import Tensor

from vlmpack.packing import Batch, Media, PackedBatch, pack_batch_sequences, pad_batch_sequences
from vlmpack.packing.batch import (
    ContextSlice,
    ImageOwners,
    MediaPart,
    PixelTable,
    Rollouts,
    TowerInputs,
    TowerSegments,
)
from vlmpack.packing.digest import OWN, digest_of
from vlmpack.packing.prefix_tree import PrefixTree, prefix_levels

FORKS = PrefixTree(parents=(-1, 0, 0), lengths=(4, 3, 3), ends=(1, 2))
ONES = torch.ones(2, dtype=torch.int64)

AS_WIDE = {
    torch.int64: torch.float64,
    torch.float64: torch.int64,
    torch.int32: torch.float32,
    torch.float32: torch.int32,
    torch.bool: torch.uint8,
}
"""Another dtype of as many bytes."""

OWN_PLACES = {
    ".context",
    ".media_part",
    ".media.pixel_values",
    ".media.tower",
    ".media.table",
    ".media.owners.rank",
}


def full_row() -> PackedBatch:
    """One in which every field of every type says something."""
    samples = [image_sample("a", axes=1), text_sample("b", [5, 6, 7])]
    return replace(
        pack_batch_sequences(samples, pad_to_multiple_of=4, pad_token_id=0),
        **said_of_slots(),
        context=ContextSlice(
            rank=0,
            size=1,
            row_index=ONES,
            natural_order=ONES,
            label_positions=ONES,
            targets=ONES,
            media_positions=ONES,
            media_sources=ONES,
            label_places=ONES,
        ),
        media_part=MediaPart(order=ONES, counts=(2,), rank=0),
        padding_mask=torch.zeros(1, 12, dtype=torch.bool),
        prefix_tree=FORKS,
        prefix_levels=prefix_levels(FORKS, (4, 4, 4)),
    )


def full_padded() -> Batch:
    return replace(
        pad_batch_sequences([image_sample("a", axes=1)], pad_token_id=0), **said_of_slots()
    )


def said_of_slots() -> dict[str, Any]:
    """What is nothing in most rows, of rows of both kinds."""
    media = Media(
        pixel_values=torch.zeros(8, 6),
        grid_thw=((1, 2, 2), (1, 2, 2)),
        num_tokens=(1, 1),
        image_sizes=((28, 28), (28, 28)),
        blocks=((1,), (1,)),
        seconds=(None, 0.5),
        tower=TowerInputs(position_ids=torch.zeros(8, 2), images=TowerSegments.of([4, 4])),
        owners=ImageOwners(ranks=(0, 1), rank=0, size=2),
        table=PixelTable(values=torch.zeros(256), kinds=torch.zeros(6, dtype=torch.int32)),
    )
    return {
        "media": media,
        "image_blocks": ((0, 2), (2, 4)),
        "media_sources": ONES,
        "label_sequences": ONES,
        "reference": torch.zeros(2, dtype=torch.float64),
        "num_shared_patches": 4,
        "sources": ONES,
        "rollouts": Rollouts(
            sampler=torch.zeros(2),
            temperatures=torch.ones(2),
            advantages=torch.zeros(2, dtype=torch.float64),
            rewards=torch.zeros(2, dtype=torch.float64),
            old=torch.zeros(2),
            reference=torch.zeros(2),
        ),
    }


def neighbours(value: Any) -> Iterator[tuple[str, Any]]:
    """The value with one thing in it changed, and where: every field of every type, every number.

    What a process has of its own becomes something that no digest is known of.
    """
    if is_dataclass(value):
        for field in fields(value):
            inner = getattr(value, field.name)
            assert inner is not None, f"full_row says nothing of {type(value)}.{field.name}"
            own = any(field.name in OWN.get(kind, ()) for kind in type(value).__mro__)
            for place, other in [("", object())] if own else neighbours(inner):
                found = replace(value)
                object.__setattr__(found, field.name, other)
                yield f".{field.name}{place}", found
    elif isinstance(value, Tensor):
        for number in range(value.numel()):
            other = value.flatten().clone()
            other[number] = not other[number] if value.dtype is torch.bool else 77
            yield "", other.view(value.shape)
        yield "", value.view(AS_WIDE[value.dtype])
        yield "", value[None]
    elif isinstance(value, tuple):
        for number, item in enumerate(value):
            for place, other in neighbours(item):
                yield place, (*value[:number], other, *value[number + 1 :])
        yield "", value[:-1]
        yield "", None
    elif isinstance(value, str):
        yield "", f"{value}'"
    else:
        yield "", 77
        if isinstance(value, int):
            yield "", float(value)  # an equal number of another type is another value


@pytest.mark.parametrize("make", [full_row, full_padded])
def test_every_field_counts_but_what_a_process_has_of_its_own(make) -> None:
    row = make()
    digest, places = digest_of(row), set()
    assert digest_of(make()) == digest
    for place, other in neighbours(row):
        assert (digest_of(other) == digest) == (place in OWN_PLACES), place
        places.add(place)
    tops = {f".{field.name}" for field in fields(row)}
    assert {f".{place.split('.')[1]}" for place in places} == tops
    if isinstance(row, PackedBatch):
        assert places >= OWN_PLACES
        named = {
            ".segment_lengths",
            ".prefix_tree.parents",
            ".prefix_levels.cu_prefixes",
            ".media.seconds",
        }
        assert places >= named


def test_texts_and_tuples_do_not_run_into_one_another() -> None:
    row = full_row()
    pairs = [
        {"keys": ("ab", "c")},
        {"keys": ("a", "bc")},
        {"keys": ("abc",), "lengths": ()},
        {"image_blocks": ((0, 1), (2, 3))},
        {"image_blocks": ((0, 1, 2, 3),)},
    ]
    assert len({digest_of(replace(row, **changes)) for changes in pairs}) == len(pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Later(PackedBatch):
    """A row with a field that digest.py has never heard of."""

    later: Any = 0


def test_a_field_that_is_added_later_counts_or_is_refused() -> None:
    content = {field.name: getattr(full_row(), field.name) for field in fields(PackedBatch)}
    digests = {digest_of(_Later(**content, later=later)) for later in (0, 1, 1.0, None, ONES)}
    assert len(digests) == 5
    with pytest.raises(TypeError, match=r"batch\.later is a set\. Expected a tensor.*OWN"):
        digest_of(_Later(**content, later={1}))
