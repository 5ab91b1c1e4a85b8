"""The shards' own count of their samples, against what the index makes of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vlmpack.data.files.samples import record_number_key
from vlmpack.data.index.table import SampleTable
from vlmpack.data.loading.read import SampleReader
from vlmpack.data.packs.split import PackedSplit
from vlmpack.data.pipeline import TrainData
from vlmpack.data.shards.branches import record_key
from vlmpack.data.shards.unlisted import unlisted_samples
from vlmpack.data.splits.streamed import StreamedSplit
from vlmpack.errors import DataError
from vlmpack.proof.audit.findings import Audit, listed
from vlmpack.storage.fetch import ShardStamp


def check_shards(audit: Audit, train: TrainData) -> None:
    """Every sample of every indexed shard is in the index.

    Packs that hold their images need no shards, and have a digest of their own.
    """
    for stamp, table, rows in _shards(train):
        try:
            known, keys = _unlisted(train.dataset.reader, stamp, table, rows)
        except DataError as error:
            audit.fault(f"the samples of a shard cannot be counted: {error}")
            continue
        if keys:
            audit.fault(
                f"{stamp.path} holds {known + len(keys)} samples, its index {known}: never drawn "
                f"were {listed(keys)}"
            )


def _unlisted(
    reader: SampleReader, stamp: ShardStamp, table: SampleTable, rows: slice
) -> tuple[int, list[str]]:
    """(records that the index has, keys of those that it lacks) of a shard, or of another file."""
    if stamp.holds_records:
        branches = None if table.branches is None else table.branches[rows].tolist()
        known = {
            record_key(key, None if branches is None or branches[place] < 0 else branches[place])
            for place, key in enumerate(table.keys[rows].to_pylist())
        }
        found = map(record_number_key, reader.files.numbers(stamp))
        return len(known), [key for key in found if key not in known]
    offsets, lengths = table.offsets[rows], table.lengths[rows]
    first = np.diff(offsets, prepend=-1) != 0  # the branches of a record have one span
    keys = unlisted_samples(reader.fetcher, stamp, offsets[first], lengths[first])
    return int(first.sum()), keys


def _shards(train: TrainData) -> Iterator[tuple[ShardStamp, SampleTable, slice]]:
    """(shard, table with its samples, which of it) of each shard that is indexed."""
    split = train.split
    if isinstance(split, StreamedSplit):
        for shard in split.index.made():
            yield from _table_shards(split.index.look_up(shard).fitted.table)
    elif not (isinstance(split, PackedSplit) and split.manifest.kind == "shards"):
        yield from _table_shards(split.fitted.table)


def _table_shards(table: SampleTable) -> Iterator[tuple[ShardStamp, SampleTable, slice]]:
    for place, stamp in enumerate(table.shards):
        rows = slice(int(table.shard_starts[place]), int(table.shard_starts[place + 1]))
        yield stamp, table, rows
