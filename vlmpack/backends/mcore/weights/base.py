"""Which boxes of which transformers tensors a Megatron parameter is made of.

A local parameter is the concatenation, along its first dimension, of boxes of whole tensors under
transformers' names. The map is linear and works element by element, so a moment maps as its weight
does. Weights, gradients, checkpoints and exports all use the same pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from vlmpack.backends.boxes import TensorSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """local[start:stop] is the box of the whole tensor, element by element.

    Shapes agree, except for the leading 1 of an expert's box in a tensor of all experts, and for a
    column that is a row here.

    Args:
        start: first row of the local parameter.
        stop: one past the last row.
        replicated: whether all tensor-parallel ranks hold this same box.
    """

    box: TensorSlice
    start: int
    stop: int
    replicated: bool


def stack_pieces(boxes: Sequence[TensorSlice], *, replicated: bool = False) -> list[Piece]:
    """Pieces that follow each other along the first dimension."""
    pieces: list[Piece] = []
    start = 0
    for box in boxes:
        stop = start + box.lengths[0]
        pieces.append(Piece(box=box, start=start, stop=stop, replicated=replicated))
        start = stop
    return pieces


def split(name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> TensorSlice:
    """The box of a whole tensor between two indices of one dimension."""
    first, last = [0] * len(shape), list(shape)
    first[dim], last[dim] = start, stop
    return TensorSlice(name=name, shape=shape, start=tuple(first), stop=tuple(last))


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBox:
    """A box, and where its elements lie in a flattened local parameter.

    Args:
        start: index of its first element in the flattened parameter; the others follow.
    """

    box: TensorSlice
    start: int

    @property
    def stop(self) -> int:
        """One past the index of its last element."""
        return self.start + prod(self.box.lengths)


def flat_boxes(piece: Piece, start: int, stop: int) -> Iterator[FlatBox]:
    """The boxes of the part of a piece that lies inside a flat range of the local parameter.

    Megatron's DistributedOptimizer gives each rank a range of the flattened parameter. Cut at row
    borders, a range is at most a partial row, whole rows and a partial row in each dimension.

    Args:
        start, stop: the range, in elements.
    """
    row_elements = prod(piece.box.lengths) // (piece.stop - piece.start)
    offset = piece.start * row_elements
    first = max(start, offset) - offset
    last = min(stop, piece.stop * row_elements) - offset
    if first >= last:
        return
    for at, low, high in _range_boxes(piece.box.lengths, first, last):
        box = TensorSlice(
            name=piece.box.name,
            shape=piece.box.shape,
            start=tuple(a + b for a, b in zip(piece.box.start, low, strict=True)),
            stop=tuple(a + b for a, b in zip(piece.box.start, high, strict=True)),
        )
        yield FlatBox(box=box, start=offset + at)


def _range_boxes(
    lengths: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """A flat range of an array as (flat start, box start, box stop), in order."""
    if len(lengths) == 1:
        yield first, (first,), (last,)
        return
    inner = prod(lengths[1:])
    row = first // inner
    while first < last:
        row_start = row * inner
        if first == row_start and last - first >= inner:  # whole rows
            rows = (last - first) // inner
            yield first, (row, *(0 for _ in lengths[1:])), (row + rows, *lengths[1:])
            row += rows
            first = row * inner
            continue
        end = min(last, row_start + inner)
        for at, low, high in _range_boxes(lengths[1:], first - row_start, end - row_start):
            yield row_start + at, (row, *low), (row + 1, *high)
        first = end
        row += 1
