"""Where the samples of a split may fork, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

MOST = 2
"""Cuts of a sample."""


@dataclass(frozen=True, slots=True)
class SampleCuts:
    """The cuts of N samples, the shorter one first.

    Args:
        lengths: (N, 2) tokens before each; 0 for none.
        digests: (N, 2) of these tokens and of their images.
    """

    lengths: Int64s
    digests: Int64s

    @classmethod
    def of(cls, column: Any) -> SampleCuts:
        """From the column `cuts` of lengths parts, a pyarrow chunked array of N lists."""
        lists = column.combine_chunks()
        counts = np.asarray(lists.value_lengths(), dtype=np.int64)
        flat = lists.flatten()
        rows = np.repeat(np.arange(counts.shape[0]), counts)
        places = np.arange(rows.shape[0]) - np.repeat(np.cumsum(counts) - counts, counts)
        found = cls(*(np.zeros((counts.shape[0], MOST), dtype=np.int64) for _ in range(2)))
        found.lengths[rows, places] = np.asarray(flat.field("length"), dtype=np.int64)
        found.digests[rows, places] = np.asarray(flat.field("digest"), dtype=np.int64)
        return found

    def replaced(self, changed: dict[int, Sequence[tuple[int, int]]]) -> SampleCuts:
        """The same with other cuts of some samples.

        Args:
            changed: number -> (length, digest) of each cut.
        """
        found = SampleCuts(self.lengths.copy(), self.digests.copy())
        for number, cuts in changed.items():
            found.lengths[number], found.digests[number] = 0, 0
            for place, (length, digest) in enumerate(cuts):
                found.lengths[number, place] = length
                found.digests[number, place] = digest
        return found
