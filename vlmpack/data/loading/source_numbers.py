"""Which source each pair of a micro-batch is of, put beside it for metrics by source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from vlmpack.data.index.table import Int64s
from vlmpack.data.loading.loader import MicroBatch


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
