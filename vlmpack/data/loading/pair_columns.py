"""Columns added to a micro-batch after it is loaded: the sources of pairs, for metrics by source,
and the log-probabilities of a reference model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vlmpack.data.index.table import Int64s
from vlmpack.data.loading.loader import MicroBatch
from vlmpack.errors import ReferenceCacheError

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PairColumns:
    """Adds both to a micro-batch.

    Args:
        sources: of each source of the split, its place among the recipe's names; empty with one
            name.
        source_of: (n,) sample numbers -> their source in the split.
        reference: (samples, 2) in the split's order, or None. Called for each micro-batch, since
            workers begin to read before it is made.
        place_of: (n,) sample numbers -> their place in that order.
    """

    sources: Sequence[int]
    source_of: Callable[[Int64s], Int64s]
    reference: Callable[[], Float64s | None]
    place_of: Callable[[Int64s], Int64s]

    def __call__(self, micro_batch: MicroBatch) -> MicroBatch:
        """The micro-batch with its columns.

        Raises:
            ReferenceCacheError: a pair of which the reference says nothing.
        """
        if self.sources and micro_batch.batch.num_pairs:
            found = np.array(self.sources, dtype=np.int64)[self.source_of(_numbers(micro_batch))]
            micro_batch = micro_batch.with_columns(sources=torch.from_numpy(found))
        reference = self.reference()
        if reference is None:
            return micro_batch
        return with_reference(micro_batch, reference, self.place_of)


def with_reference(
    micro_batch: MicroBatch, reference: Float64s, place_of: Callable[[Int64s], Int64s]
) -> MicroBatch:
    """The micro-batch with what the reference model says of its sequences.

    Args:
        reference: (samples, 2) in the split's order, NaN where nothing is known.

    Raises:
        ReferenceCacheError: a pair of which nothing is known.
    """
    found = reference[place_of(_numbers(micro_batch))].reshape(-1)
    unknown = np.flatnonzero(np.isnan(found))
    if unknown.size:
        sample = micro_batch.samples[int(unknown[0]) // 2]
        raise ReferenceCacheError(
            f"sample {sample.key!r} of {sample.shard} has no log-probabilities of the reference "
            "model: it could not be read when they were made, and can be now. Run `vlmpack "
            "reference` again, then resume"
        )
    return micro_batch.with_columns(reference=torch.from_numpy(found.copy()))


def _numbers(micro_batch: MicroBatch) -> Int64s:
    return np.array([sample.number for sample in micro_batch.samples], dtype=np.int64)
