"""The shards' own count of their samples, against what the index makes of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vlmpack.data.index.table import Int64s, SampleTable
from vlmpack.data.packs.split import PackedSplit
from vlmpack.data.pipeline import TrainData
from vlmpack.data.shards.unlisted import unlisted_samples
from vlmpack.data.splits.streamed import StreamedSplit
from vlmpack.errors import DataError
from vlmpack.proof.audit.findings import Audit, listed
from vlmpack.storage.fetch import ShardStamp


def check_shards(audit: Audit, train: TrainData) -> None:
    """Every sample of every indexed shard is in the index.

    Packs that hold their images need no shards, and have a digest of their own.
    """
    for stamp, offsets, lengths in _spans(train):
        fetcher = train.dataset.reader.fetcher
        try:
            keys = unlisted_samples(fetcher, stamp, offsets, lengths)
        except DataError as error:
            audit.fault(f"the samples of a shard cannot be counted: {error}")
            continue
        if keys:
            known = offsets.shape[0]
            audit.fault(
                f"{stamp.path} holds {known + len(keys)} samples, its index {known}: never drawn "
                f"were {listed(keys)}"
            )


def _spans(train: TrainData) -> Iterator[tuple[ShardStamp, Int64s, Int64s]]:
    """(shard, offsets, lengths of its samples) of each shard that is indexed."""
    split = train.split
    if isinstance(split, StreamedSplit):
        for shard in split.index.made():
            yield from _table_spans(split.index.look_up(shard).fitted.table)
    elif not (isinstance(split, PackedSplit) and split.manifest.kind == "shards"):
        yield from _table_spans(split.fitted.table)


def _table_spans(table: SampleTable) -> Iterator[tuple[ShardStamp, Int64s, Int64s]]:
    for place, stamp in enumerate(table.shards):
        rows = slice(int(table.shard_starts[place]), int(table.shard_starts[place + 1]))
        offsets, lengths = table.offsets[rows], table.lengths[rows]
        first = np.diff(offsets, prepend=-1) != 0  # the branches of a record have one span
        yield stamp, offsets[first], lengths[first]
