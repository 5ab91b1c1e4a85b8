"""Modes `in_batch` and `none`: consecutive samples, `micro_batch_size` to a bin."""

from __future__ import annotations

from vlmpack.data.modes.base import Cutting, PackingMode, RowShape, Uncut
from vlmpack.data.plan.packers import FixedPacker, window_samples
from vlmpack.data.protocols import Collator
from vlmpack.packing.padded import PadCollator


class InBatch(PackingMode):
    """The samples of one micro-batch become one row."""

    def cut(self, split: Uncut) -> Cutting:
        """See PackingMode: consecutive samples, `micro_batch_size` to a bin."""
        packer = FixedPacker(split.global_batch_size, split.micro_batch_size)
        return Cutting(packer, window_samples(split.global_batch_size))


class Padded(InBatch):
    """The same bins as padded rows: the baseline that everything is measured against."""

    def collator(self, *, pad_token_id: int, num_position_axes: int) -> Collator:
        """See PackingMode."""
        return PadCollator(
            pad_token_id=pad_token_id,
            num_position_axes=num_position_axes,
            pad_to_multiple_of=self.multiples.row,
        )

    def shape(self) -> RowShape:
        """See PackingMode."""
        return RowShape(padded=True, row_multiple=self.multiples.row)
