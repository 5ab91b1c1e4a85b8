"""Packing: samples -> one THD row with its boundaries. torch only."""

from vlmpack.alignment import Alignment, alignment, round_up
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
from vlmpack.packing.collate import (
    PackCollator,
    PadCollator,
    pack_batch_sequences,
    pad_batch_sequences,
)
from vlmpack.packing.context import (
    padded_as_row,
    padding_mask,
    slice_for_context,
    zigzag_index,
)
from vlmpack.packing.sharing import share_media

__all__ = [
    "IGNORE_INDEX",
    "Alignment",
    "Batch",
    "ContextSlice",
    "EncodedSample",
    "GridTHW",
    "Media",
    "MediaShare",
    "PackCollator",
    "PackedBatch",
    "PackedSeqParams",
    "PadCollator",
    "PaddedBatch",
    "alignment",
    "move_batch",
    "pack_batch_sequences",
    "pack_padded_batch",
    "pad_batch_sequences",
    "padded_as_row",
    "padding_mask",
    "pin_batch",
    "round_up",
    "share_media",
    "slice_for_context",
    "zigzag_index",
]
