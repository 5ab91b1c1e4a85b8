"""What the data layer requires of a collator, and how it writes image sizes. A collator is pickled
to worker processes, as the encoder is. A packing mode may bring its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vlmpack.packing.batch import EncodedSample, PackedBatch, PaddedBatch
from vlmpack.packing.row_layout import FixedShape

ImageSize = tuple[int, int]
"""(width, height) in pixels, as the image is seen: after its EXIF orientation."""


class Collator(Protocol):
    """Puts the samples of one bin into one batch."""

    @property
    def pad_to_multiple_of(self) -> int:
        """The multiple for each sample's slots, or for the width of padded rows."""

    @property
    def fixed(self) -> FixedShape | None:
        """The one shape of all its batches, where they have one."""

    def __call__(self, samples: Sequence[EncodedSample]) -> PackedBatch | PaddedBatch:
        """The samples as one batch, in their order."""

    def empty(self) -> PackedBatch | PaddedBatch:
        """A batch without samples and without loss, which still runs through the model."""
