"""Which samples show the same images, by digests of their bytes; where samples may branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""Its powers mark the places of a sample's images. Odd, so multiplying loses nothing."""


def group_numbers(numbers: Int64s, digests: Int64s) -> Int64s:
    """(n,) the group of each sample: the number of the first sample here with the same digest.

    Args:
        numbers: (n,) the samples of one source; one that comes twice counts as one.
        digests: (n,) of their images; 0 where a sample has none and is alone.
    """
    _, first, place = np.unique(digests, return_index=True, return_inverse=True)
    return np.where(digests == 0, numbers, numbers[first[place]])


def joined_digests(lists: Any) -> Int64s:
    """(N,) one digest of each sample's list of image digests, in order; 0 where it has none."""
    counts = np.asarray(lists.value_lengths(), dtype=np.int64)
    digests = np.asarray(lists.flatten(), dtype=np.int64).view(np.uint64)
    starts = np.cumsum(counts) - counts
    place = np.arange(digests.shape[0]) - np.repeat(starts, counts)
    powers = np.cumprod(np.full(int(counts.max(initial=0)), _MULTIPLIER), dtype=np.uint64)
    joined = np.zeros(counts.shape[0], dtype=np.uint64)
    if digests.size:
        joined[counts > 0] = np.add.reduceat(digests * powers[place], starts[counts > 0])
    return joined.view(np.int64)


def shared_images(lists: Any) -> tuple[int, int]:
    """How many samples share an image with another one, and how many have exactly another's images
    in the same order."""
    counts = np.asarray(lists.value_lengths(), dtype=np.int64)
    digests = np.asarray(lists.flatten(), dtype=np.int64)
    owners = np.repeat(np.arange(counts.shape[0]), counts)
    shown = np.unique(np.stack([digests, owners]), axis=1)  # an image once in each sample
    _, place, seen = np.unique(shown[0], return_inverse=True, return_counts=True)
    some = np.unique(shown[1, seen[place] > 1])
    joined = joined_digests(lists)
    _, seen = np.unique(joined[joined != 0], return_counts=True)
    return int(some.size), int(seen[seen > 1].sum())


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
        """From the column `prefixes` of lengths parts, a pyarrow chunked array of N lists."""
        lists = column.combine_chunks()
        counts = np.asarray(lists.value_lengths(), dtype=np.int64)
        flat = lists.flatten()
        rows = np.repeat(np.arange(counts.shape[0]), counts)
        places = np.arange(rows.shape[0]) - np.repeat(np.cumsum(counts) - counts, counts)
        shape = (counts.shape[0], max(LEAST, int(counts.max(initial=0))))
        prefixes = cls(*(np.zeros(shape, dtype=np.int64) for _ in range(2)))
        prefixes.lengths[rows, places] = np.asarray(flat.field("length"), dtype=np.int64)
        prefixes.digests[rows, places] = np.asarray(flat.field("digest"), dtype=np.int64)
        return prefixes

    def replaced(self, changed: dict[int, Sequence[tuple[int, int]]]) -> SamplePrefixes:
        """The prefixes, with other (length, digest) pairs for some samples."""
        most = max(map(len, changed.values()), default=0)
        wider = ((0, 0), (0, max(0, most - self.lengths.shape[1])))
        wide = SamplePrefixes(np.pad(self.lengths, wider), np.pad(self.digests, wider))
        for number, prefixes in changed.items():
            wide.lengths[number], wide.digests[number] = 0, 0
            for place, (length, digest) in enumerate(prefixes):
                wide.lengths[number, place] = length
                wide.digests[number, place] = digest
        return wide
