"""What stands beside the samples of a micro-batch: the sources of its pairs, and what the reference
model says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vlmpack.data.index.table import Int64s
from vlmpack.data.loading.loader import MicroBatch
from vlmpack.data.loading.reference import Float64s, with_reference
from vlmpack.data.loading.source_numbers import with_sources


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
