"""Packing: which samples share a row, and samples -> one THD row with its boundaries.

What chooses (`plan_packs`, `StreamPacker`, `balance`, `CostModel`) needs only numpy. What builds
rows needs torch, and is imported on first use, so that planning runs without it.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from vlmpack.alignment import Alignment as Alignment
from vlmpack.alignment import alignment as alignment
from vlmpack.alignment import round_up as round_up
from vlmpack.packing.balance import CostModel as CostModel
from vlmpack.packing.balance import balance as balance
from vlmpack.packing.offline import plan_packs as plan_packs
from vlmpack.packing.stream import StreamPacker as StreamPacker

if TYPE_CHECKING:
    from vlmpack.packing.batch import IGNORE_INDEX as IGNORE_INDEX
    from vlmpack.packing.batch import Batch as Batch
    from vlmpack.packing.batch import ContextSlice as ContextSlice
    from vlmpack.packing.batch import EncodedSample as EncodedSample
    from vlmpack.packing.batch import GridTHW as GridTHW
    from vlmpack.packing.batch import Media as Media
    from vlmpack.packing.batch import MediaPart as MediaPart
    from vlmpack.packing.batch import PackedBatch as PackedBatch
    from vlmpack.packing.batch import PackedSeqParams as PackedSeqParams
    from vlmpack.packing.batch import PaddedBatch as PaddedBatch
    from vlmpack.packing.batch import Prefix as Prefix
    from vlmpack.packing.collate import PackCollator as PackCollator
    from vlmpack.packing.collate import PadCollator as PadCollator
    from vlmpack.packing.collate import pack_batch_sequences as pack_batch_sequences
    from vlmpack.packing.collate import pack_padded_batch as pack_padded_batch
    from vlmpack.packing.collate import pad_batch_sequences as pad_batch_sequences
    from vlmpack.packing.context import padded_as_row as padded_as_row
    from vlmpack.packing.context import padding_mask as padding_mask
    from vlmpack.packing.context import slice_for_context as slice_for_context
    from vlmpack.packing.context import zigzag_index as zigzag_index
    from vlmpack.packing.image_owners import deal_media as deal_media
    from vlmpack.packing.media import move_batch as move_batch
    from vlmpack.packing.media import pin_batch as pin_batch
    from vlmpack.packing.row_layout import FixedShape as FixedShape

_HOMES = {
    "batch": (
        "IGNORE_INDEX",
        "Batch",
        "ContextSlice",
        "Prefix",
        "EncodedSample",
        "GridTHW",
        "Media",
        "MediaPart",
        "PackedBatch",
        "PackedSeqParams",
        "PaddedBatch",
    ),
    "collate": (
        "PackCollator",
        "PadCollator",
        "pack_batch_sequences",
        "pack_padded_batch",
        "pad_batch_sequences",
    ),
    "context": ("padded_as_row", "padding_mask", "slice_for_context", "zigzag_index"),
    "image_owners": ("deal_media",),
    "media": ("move_batch", "pin_batch"),
    "row_layout": ("FixedShape",),
}

_HERE = ("Alignment", "CostModel", "StreamPacker", "alignment", "balance", "plan_packs", "round_up")
__all__ = sorted((*_HERE, *chain(*_HOMES.values())))


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(f"vlmpack.packing.{module}"), name)
    raise AttributeError(f"module 'vlmpack.packing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
