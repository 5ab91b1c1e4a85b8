"""What must hold of the context-parallel ranks' slices of a row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from vlmpack.proof.rows.row import BOUNDARIES, NO_LOSS, Broken, Counts, Row


def check_slices(row: Row) -> Counts:
    """Each slot on one rank, the one that zigzag gives it; each label on its slot's rank.

    Raises:
        Broken: what does not hold.
    """
    if isinstance(row.slices, str):
        raise Broken(row.slices, BOUNDARIES)
    held: dict[int, int] = {}
    for part in row.slices:
        for slot in part.row_index.tolist():
            if slot in held:
                raise Broken(f"slot {slot} is on ranks {held[slot]} and {part.rank}")
            held[slot] = part.rank
    for slot, rank in _zigzag(row):
        if slot not in held:
            raise Broken(f"slot {slot} is on no rank")
        if held[slot] != rank:
            raise Broken(f"slot {slot} is on rank {held[slot]}, zigzag puts it on {rank}")
    if len(held) != row.num_slots:
        raise Broken(f"the ranks hold {len(held)} slots, the row has {row.num_slots}")
    labels = row.batch.labels.flatten().tolist()
    learnt = 0
    for part in row.slices:
        own = part.row_index.tolist()
        slots = [own[place] for place in part.label_positions.tolist()]
        if [labels[slot] for slot in slots] != part.targets.tolist():
            raise Broken(f"rank {part.rank}: its targets are not the labels of its slots")
        learnt += len(slots)
    if learnt != sum(label != NO_LOSS for label in labels):
        raise Broken(f"the ranks learn {learnt} labels, the row has {row.batch.num_label_tokens}")
    return (row.num_slots // row.rules.context,)


def _zigzag(row: Row) -> Iterator[tuple[int, int]]:
    """(slot, rank): chunk c of the 2*CP of a segment is rank min(c, 2*CP - 1 - c)'s."""
    chunks = 2 * row.rules.context
    behind = row.boundaries[len(row.alone) + 1 :]  # of segments that hold no sample
    for start, end in pairwise((0, *row.ends, *behind)):
        length = end - start
        for offset in range(length):
            chunk = offset * chunks // length
            yield start + offset, min(chunk, chunks - 1 - chunk)
