"""Rows for the contract with Transformer Engine, and what is kept of a call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from support.samples import text_sample

from vlmpack.packing import (
    FixedShape,
    PackCollator,
    PackedBatch,
    pad_batch_sequences,
    padded_as_row,
)

SIZES = (1, 2, 4)
"""Of the context-parallel group."""


@dataclass(frozen=True)
class Call:
    """What attention was handed.

    Args:
        version: of Transformer Engine.
        size: CP.
        row: its name.
        arguments: by name; tensors that were one object are one here, too.
        slots: the row's slots that each rank held.
        bounds: how many of the arguments are boundaries.
        objects: how many tensors these are.
    """

    version: str
    size: int
    row: str
    arguments: dict[str, Any]
    slots: list[list[int]]
    bounds: int
    objects: int


def row_of(lengths: tuple[int, ...], size: int, fixed: FixedShape | None = None) -> PackedBatch:
    samples = [text_sample(str(n), range(1, 1 + n)) for n in lengths]
    multiple = 2 * size
    collate = PackCollator(
        pad_token_id=0,
        num_position_axes=1,
        pad_to_multiple_of=multiple,
        total_multiple_of=multiple,
        fixed=fixed,
    )
    return collate(samples)


def mode_none(size: int) -> PackedBatch:
    samples = [text_sample(str(n), range(1, 1 + n)) for n in (11, 16, 3)]
    return padded_as_row(pad_batch_sequences(samples, pad_token_id=0, pad_to_multiple_of=16))


ROWS = {
    "aligned": partial(row_of, (16, 8)),
    "one odd sample": partial(row_of, (14,)),
    "last odd": partial(row_of, (16, 8, 5)),
    "odd ones between": partial(row_of, (3, 16, 9, 8)),
    "empty": partial(row_of, ()),
    "mode none": mode_none,
    "fixed shape": partial(row_of, (9, 8), fixed=FixedShape(row_tokens=64, max_sequences=4)),
}
"""Made for a size of the group."""
