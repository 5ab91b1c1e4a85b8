"""Where the samples of a split may fork, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

LEAST = 2
"""Columns for the prefixes of a sample; more where some have more."""


@dataclass(frozen=True, slots=True)
class SamplePrefixes:
    """The prefixes of N samples, the shorter one first.

    Args:
        lengths: (N, k) tokens before each; 0 for none.
        digests: (N, k) of these tokens and of their images.
    """

    lengths: Int64s
    digests: Int64s

    @classmethod
    def of(cls, column: Any) -> SamplePrefixes:
        """From the column `cuts` of lengths parts, a pyarrow chunked array of N lists."""
        lists = column.combine_chunks()
        counts = np.asarray(lists.value_lengths(), dtype=np.int64)
        flat = lists.flatten()
        rows = np.repeat(np.arange(counts.shape[0]), counts)
        places = np.arange(rows.shape[0]) - np.repeat(np.cumsum(counts) - counts, counts)
        shape = (counts.shape[0], max(LEAST, int(counts.max(initial=0))))
        found = cls(*(np.zeros(shape, dtype=np.int64) for _ in range(2)))
        found.lengths[rows, places] = np.asarray(flat.field("length"), dtype=np.int64)
        found.digests[rows, places] = np.asarray(flat.field("digest"), dtype=np.int64)
        return found

    def replaced(self, changed: dict[int, Sequence[tuple[int, int]]]) -> SamplePrefixes:
        """The same with other prefixes of some samples.

        Args:
            changed: number -> (length, digest) of each cut.
        """
        most = max(map(len, changed.values()), default=0)
        wider = ((0, 0), (0, max(0, most - self.lengths.shape[1])))
        found = SamplePrefixes(np.pad(self.lengths, wider), np.pad(self.digests, wider))
        for number, prefixes in changed.items():
            found.lengths[number], found.digests[number] = 0, 0
            for place, (length, digest) in enumerate(prefixes):
                found.lengths[number, place] = length
                found.digests[number, place] = digest
        return found
