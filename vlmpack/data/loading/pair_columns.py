"""What stands beside the samples of a micro-batch: the sources of its pairs, and what the reference
model says of them."""

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


def with_reference(
    micro_batch: MicroBatch, reference: Float64s | None, places: Callable[[Int64s], Int64s]
) -> MicroBatch:
    """The micro-batch with what the reference model says of its sequences.

    Args:
        micro_batch: as it was loaded.
        reference: (samples, 2) in the split's order, NaN where nothing is known; None where nobody
            asks for it.
        places: (n,) numbers of samples -> where they stand in that order.

    Raises:
        ReferenceCacheError: a pair of which nothing is known.
    """
    if reference is None:
        return micro_batch
    numbers = np.array([sample.number for sample in micro_batch.samples], dtype=np.int64)
    found = reference[places(numbers)].reshape(-1)
    unknown = np.flatnonzero(np.isnan(found))
    if unknown.size:
        sample = micro_batch.samples[int(unknown[0]) // 2]
        raise ReferenceCacheError(
            f"sample {sample.key!r} of {sample.shard} has no log-probabilities of the reference "
            "model: it could not be read when they were made, and can be now. Run `vlmpack "
            "reference` again, then resume"
        )
    return micro_batch.beside(reference=torch.from_numpy(found.copy()))


def with_sources(
    micro_batch: MicroBatch, places: Sequence[int], of: Callable[[Int64s], Int64s]
) -> MicroBatch:
    """The micro-batch with the source of each of its pairs; as it is where samples are none, or
    the recipe has one name.

    Args:
        micro_batch: as it was loaded.
        places: of each source of the split among the recipe's names; empty where there is one.
        of: (n,) numbers of samples -> their source in the split.
    """
    if not places or not micro_batch.batch.num_pairs:
        return micro_batch
    numbers = np.array([sample.number for sample in micro_batch.samples], dtype=np.int64)
    found = torch.from_numpy(np.array(places, dtype=np.int64)[of(numbers)])
    return micro_batch.beside(sources=found)


@dataclass(frozen=True, slots=True)
class Beside:
    """Puts it there.

    Args:
        sources: of each source of the split among the recipe's names; empty where there is one.
        source_of: (n,) numbers of samples -> their source in the split.
        reference: (samples, 2) in the split's order, None where nobody asks for it; asked for with
            each micro-batch, since workers begin to read before it is made.
        place_of: (n,) numbers of samples -> where they stand in that order.
    """

    sources: Sequence[int]
    source_of: Callable[[Int64s], Int64s]
    reference: Callable[[], Float64s | None]
    place_of: Callable[[Int64s], Int64s]

    def __call__(self, micro_batch: MicroBatch) -> MicroBatch:
        """The micro-batch with both.

        Raises:
            ReferenceCacheError: a pair of which the reference says nothing.
        """
        sourced = with_sources(micro_batch, self.sources, self.source_of)
        return with_reference(sourced, self.reference(), self.place_of)
