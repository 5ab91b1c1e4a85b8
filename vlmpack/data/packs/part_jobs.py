"""Which packs share a tar, and what the process that writes it is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from vlmpack.data.index.table import SampleTable
from vlmpack.data.packs.parts import PartJob
from vlmpack.data.plan.packs import PackArrays

PART_BYTES = 64 << 20
"""About what one tar holds."""
TOKEN_BYTES = 24
"""Bytes of a saved token, three position axes included."""


def part_cuts(table: SampleTable, arrays: PackArrays, part_packs: int) -> list[int]:
    """(F + 1,) packs before each tar of about PART_BYTES: by the index, so the same in any
    process."""
    numbers = arrays.numbers
    sizes = table.lengths[numbers] + TOKEN_BYTES * table.num_tokens[numbers]
    before = np.concatenate(([0], np.cumsum(sizes)))
    cuts = [0]
    while cuts[-1] < arrays.num_packs:
        first = cuts[-1]
        full = before[arrays.starts[first]] + PART_BYTES
        reached = int(np.searchsorted(before[arrays.starts], full, side="right")) - 1
        cuts.append(min(max(first + 1, reached), first + part_packs, arrays.num_packs))
    return cuts


def part_jobs(table: SampleTable, arrays: PackArrays, cuts: Sequence[int]) -> Iterator[PartJob]:
    """Each as it is asked for: it holds what a process needs of every sample."""
    table = replace(table, keys=table.keys.combine_chunks())  # no search through the shards'
    for number, (first, stop) in enumerate(pairwise(cuts)):
        packs = tuple(
            tuple(table.ref(sample) for sample in arrays.members(pack))
            for pack in range(first, stop)
        )
        yield PartJob(number, first, packs)
