"""Packing: which samples share a row, and samples -> one THD row with its boundaries.

What chooses (`plan_packs`, `StreamPacker`, `balance`, `CostModel`) needs numpy alone. What builds
rows needs torch, and is resolved on first use, so that planning stays free of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmpack.alignment import Alignment, alignment, round_up
from vlmpack.packing.balance import balance
from vlmpack.packing.cost import CostModel
from vlmpack.packing.offline import plan_packs
from vlmpack.packing.stream import StreamPacker

if TYPE_CHECKING:
    from vlmpack.packing.batch import (
        IGNORE_INDEX,
        Batch,
        ContextSlice,
        EncodedSample,
        GridTHW,
        Media,
        MediaShare,
        PackedBatch,
        PackedSeqParams,
        PaddedBatch,
        move_batch,
        pin_batch,
    )
    from vlmpack.packing.bridge import pack_padded_batch
    from vlmpack.packing.collate import PackCollator, pack_batch_sequences
    from vlmpack.packing.context import (
        padded_as_row,
        padding_mask,
        slice_for_context,
        zigzag_index,
    )
    from vlmpack.packing.padded import PadCollator, pad_batch_sequences
    from vlmpack.packing.row_layout import FixedShape
    from vlmpack.packing.sharing import share_media

_HOMES = {
    "batch": (
        "IGNORE_INDEX",
        "Batch",
        "ContextSlice",
        "EncodedSample",
        "GridTHW",
        "Media",
        "MediaShare",
        "PackedBatch",
        "PackedSeqParams",
        "PaddedBatch",
        "move_batch",
        "pin_batch",
    ),
    "bridge": ("pack_padded_batch",),
    "collate": ("PackCollator", "pack_batch_sequences"),
    "context": ("padded_as_row", "padding_mask", "slice_for_context", "zigzag_index"),
    "padded": ("PadCollator", "pad_batch_sequences"),
    "row_layout": ("FixedShape",),
    "sharing": ("share_media",),
}

__all__ = [
    "IGNORE_INDEX",
    "Alignment",
    "Batch",
    "ContextSlice",
    "CostModel",
    "EncodedSample",
    "FixedShape",
    "GridTHW",
    "Media",
    "MediaShare",
    "PackCollator",
    "PackedBatch",
    "PackedSeqParams",
    "PadCollator",
    "PaddedBatch",
    "StreamPacker",
    "alignment",
    "balance",
    "move_batch",
    "pack_batch_sequences",
    "pack_padded_batch",
    "pad_batch_sequences",
    "padded_as_row",
    "padding_mask",
    "pin_batch",
    "plan_packs",
    "round_up",
    "share_media",
    "slice_for_context",
    "zigzag_index",
]


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(f"vlmpack.packing.{module}"), name)
    raise AttributeError(f"module 'vlmpack.packing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
