"""Packing: samples -> one THD row with its boundaries. torch only."""

from vlmpack.alignment import Alignment, alignment, round_up
from vlmpack.packing.batch import (
    IGNORE_INDEX,
    Batch,
    EncodedSample,
    GridTHW,
    Media,
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

__all__ = [
    "IGNORE_INDEX",
    "Alignment",
    "Batch",
    "EncodedSample",
    "GridTHW",
    "Media",
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
    "pin_batch",
    "round_up",
]
