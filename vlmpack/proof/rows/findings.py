"""What the checks of a row share."""

from __future__ import annotations

from vlmpack.proof.rows.row import Row

NO_LOSS = -100
"""The label of a slot without loss: said here again, so that a wrong constant elsewhere shows."""

COLLATOR = "the collator (vlmpack/packing/collate.py)"
BOUNDARIES = "cu_seqlens and segment_lengths of the row"

Counts = tuple[int, ...]
"""What a check counted in one row; of several rows the counts are added."""


class Broken(Exception):
    """A property that does not hold.

    Args:
        detail: what was found.
        look_at: where such a fault comes from.
    """

    def __init__(self, detail: str, look_at: str = "") -> None:
        super().__init__(detail)
        self.look_at = look_at


def owners_of(row: Row) -> list[int]:
    """For each slot, the sample that it belongs to, or -1; one slot more, of no sample."""
    owners = [-1] * (row.num_slots + 1)
    for number, (item, start) in enumerate(zip(row.alone, row.starts, strict=True)):
        if start + item.length > row.num_slots:
            raise Broken(
                f"{item.key} must be at slots {start} to {start + item.length - 1}, the row has "
                f"{row.num_slots}",
                COLLATOR,
            )
        owners[start : start + item.length] = [number] * item.length
    return owners
