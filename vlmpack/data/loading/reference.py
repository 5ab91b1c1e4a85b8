"""A reference model's log-probabilities of pairs, put beside the micro-batches that train them."""

from __future__ import annotations

from collections.abc import Callable

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
