"""Index and lengths of a split in one file of columns, which all processes of a node read.

It is named after the index parts that it was made from. One process writes it, with the memory of
one chunk, and those that want it wait. Where it cannot be written, each keeps it in memory.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from vlmpack.data.index.columns_file import CHUNK, ColumnsFile, ColumnsWriter, open_columns
from vlmpack.data.index.groups import SamplePrefixes, joined_digests
from vlmpack.data.index.held_out import NEVER, OPENING
from vlmpack.data.index.lengths import CHOSEN, COUNTS, ShardBuilder, load_lengths, objects_said
from vlmpack.data.index.parts import (
    BuildSettings,
    Part,
    PartRows,
    build_parts,
    part_for,
    unwritable,
)
from vlmpack.data.index.rollouts import ROLLOUT_COLUMNS
from vlmpack.data.index.shard_index import ShardIndex, load_index
from vlmpack.data.shards.naming import count_keys
from vlmpack.errors import DataError, transport_error
from vlmpack.storage.fetch import ShardStamp
from vlmpack.whole_file import written_whole

logger = logging.getLogger("vlmpack")

LARGE = 4_000_000
"""Samples from which on no process keeps numbers of a split in memory."""
MOST_IN_MEMORY = 10_000_000
"""Samples of a table for which there is no room on the disk."""
MOST_KEPT = 8
KEPT_SECONDS = 24 * 3600
"""A folder keeps the last MOST_KEPT tables that were used, and those that were within a day."""
SUFFIX = ".table"
DIGESTS, STAMPS, PREFIXES = "image_digests", "image_stamps", ("prefix_length", "prefix_digest")
DEFAULTS = {"branch": -1, "row": 0, OPENING: NEVER}
"""The values of columns that a part may lack, or have nulls in."""

_NUMBERS = ("offset", "length", "crc32", *COUNTS, CHOSEN, *DEFAULTS, *ROLLOUT_COLUMNS)
_OF_INDEX = {"key", "offset", "length", "crc32", *DEFAULTS, DIGESTS, STAMPS}

Pair = tuple[ShardIndex, PartRows]
"""A shard's index, and its lengths."""


class TableWriter:
    """Writes the samples of shards, CHUNK at a time."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self.num_samples = 0
        self._columns = ColumnsWriter(stream, name)
        self._waiting: list[tuple[Any, Any]] = []
        self._written = self._num_waiting = 0
        self._counts: list[int] = []
        self._contents: list[str] = []
        self._unknown: list[Mapping[str, int]] = []
        self._objects = ""
        self._lengths = hashlib.blake2b(digest_size=16)
        self._faults: defaultdict[tuple[str, str], list[int]] = defaultdict(list)

    def add(self, shard: ShardIndex, lengths: PartRows) -> None:
        """The next shard."""
        for rows, of_rows in zip(shard.rows.groups(), lengths.groups(), strict=True):
            names = [name for name in rows.column_names if name in _OF_INDEX]
            self._waiting.append((rows.select(names).replace_schema_metadata(None), of_rows))
            self._num_waiting += rows.num_rows
            if self._num_waiting >= CHUNK:
                self._write(CHUNK)
        self._counts.append(shard.num_samples)
        self._contents.append(shard.content)
        self._unknown.append(shard.unknown_keys)
        self._objects = self._objects or objects_said(lengths)
        self.num_samples += shard.num_samples

    def finish(self) -> None:
        """Writes the rest, and what is known of the whole."""
        if self._waiting:
            self._write(1)
        bad = np.asarray([n for numbers in self._faults.values() for n in numbers], np.int64)
        facts = {
            "shard_counts": self._counts,
            "contents": self._contents,
            "unknown_keys": count_keys(self._unknown),
            "objects": self._objects,
            "lengths": self._lengths.hexdigest(),
            "faults": [[*fault, len(numbers)] for fault, numbers in self._faults.items()],
            "bad": self._columns.numbers(bad),
        }
        self._columns.finish(facts)

    def _write(self, least: int) -> None:
        """Write chunks until fewer than `least` samples wait."""
        rows = pa.concat_tables([row for row, _ in self._waiting], promote_options="default")
        lengths = pa.concat_tables([each for _, each in self._waiting]).replace_schema_metadata()
        while rows.num_rows >= least:
            self._write_chunk(rows.slice(0, CHUNK), lengths.slice(0, CHUNK))
            rows, lengths = rows.slice(CHUNK), lengths.slice(CHUNK)
        self._waiting, self._num_waiting = [(rows, lengths)], rows.num_rows

    def _write_chunk(self, rows: Any, lengths: Any) -> None:
        table = rows
        for name in lengths.column_names:
            table = table.append_column(name, lengths.column(name))
        table = table.combine_chunks()
        self._lengths.update(table.column("num_tokens").to_numpy().tobytes())
        there = [name for name in _NUMBERS if name in table.column_names]
        numbers = {
            name: np.asarray(table.column(name).fill_null(DEFAULTS.get(name, 0)).to_numpy())
            for name in there
        }
        numbers[DIGESTS] = joined_digests(table.column(DIGESTS).combine_chunks())
        if "prefixes" in table.column_names:
            prefixes = SamplePrefixes.of(table.column("prefixes"))
            for name, columns in zip(PREFIXES, (prefixes.lengths, prefixes.digests), strict=True):
                numbers |= {f"{name}.{k}": columns[:, k] for k in range(columns.shape[1])}
        texts = {"key": table.column("key").combine_chunks()}
        if STAMPS in table.column_names and table.column(STAMPS).null_count < table.num_rows:
            listed = table.column(STAMPS).to_pylist()
            texts[STAMPS] = pa.array([json.dumps(each) if each else "" for each in listed])
        self._columns.add(numbers, texts)
        bad = table.select(("error_class", "reason"))
        for number in np.flatnonzero(table.column("reason").is_valid().to_numpy()).tolist():
            fault = bad.slice(number, 1).to_pylist()[0]
            self._faults[fault["error_class"], fault["reason"]].append(self._written + number)
        self._written += table.num_rows


def open_table(
    stamps: Sequence[ShardStamp],
    builder: ShardBuilder,
    settings: BuildSettings,
    *,
    keep: bool = True,
) -> ColumnsFile:
    """The table of some shards. What is missing of it is indexed, measured and written.

    One process writes the file, and those that want it wait. Where it cannot be written, each
    process keeps the table in memory.

    Args:
        keep: whether a file of fewer than LARGE samples is compared and kept in memory.

    Raises:
        DataError: the first shard in order that is damaged or out of reach; class `transport` where
            a table of more than MOST_IN_MEMORY samples cannot be written.
    """
    index, lengths, path = table_parts(stamps, builder, settings)
    file = _open_current(path, builder, keep=keep)
    if file is not None:
        return file
    build_parts(index, builder, settings, what="index")
    build_parts(lengths, builder.lengths, settings, what="lengths")
    pairs = partial(_pairs, index, lengths, builder)
    try:
        build_parts([Part(stamps[0], str(path))], partial(_write, pairs), settings, what="table")
        if (file := _open_current(path, builder, keep=keep)) is not None:
            return file
        raise unwritable(str(path), OSError("it does not read back"))
    except DataError as error:
        if error.error_class != "transport":
            raise
        logger.warning("%-14s %s; each process keeps it in memory", "index", error.reason)
    return in_memory(pairs())


def table_parts(
    stamps: Sequence[ShardStamp], builder: ShardBuilder, settings: BuildSettings
) -> tuple[list[Part], list[Part], Path]:
    """The index parts and the lengths parts of some shards, and the path of the table of both."""
    rules = (builder.rule, builder.lengths.rule)
    index, lengths = ([part_for(settings.directory, s, rule) for s in stamps] for rule in rules)
    names = "\n".join(part.path.rpartition("/")[2] for part in (*index, *lengths))
    digest = hashlib.blake2b(names.encode(errors="surrogateescape"), digest_size=16).hexdigest()
    return index, lengths, settings.directory / f"{digest}{SUFFIX}"


def _open_current(path: Path, builder: ShardBuilder, *, keep: bool) -> ColumnsFile | None:
    """The file, where it is whole and its objects are written as they are now."""
    file = open_columns(path)
    if file is None:
        return None
    try:
        if keep and file.num_rows < LARGE:
            file.keep_in_memory()
    except DataError as error:
        logger.warning("%s", error.reason)
        return None
    objects = file.facts["objects"]
    if objects and objects != builder.lengths.encoder.objects_said:
        file.remove()
        return None
    with suppress(OSError):
        os.utime(path)  # used: others are older
    return file


def _pairs(index: Sequence[Part], lengths: Sequence[Part], builder: ShardBuilder) -> Iterator[Pair]:
    for part, of_lengths in zip(index, lengths, strict=True):
        shard = load_index(part, builder)
        yield shard, load_lengths(of_lengths, shard, builder.lengths)


def _write(pairs: Callable[[], Iterable[Pair]], part: Part) -> None:
    path = Path(part.path)
    try:
        with written_whole(path) as stream:
            writer = TableWriter(stream, path.name)
            for pair in pairs():
                writer.add(*pair)
            writer.finish()
    except OSError as error:
        raise unwritable(part.path, error) from error
    with suppress(OSError):  # another process may remove the same ones
        found = sorted(path.parent.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime_ns)
        unfinished = path.parent.glob(f".*{SUFFIX}.*.tmp")
        for file in (*found[:-MOST_KEPT], *unfinished):
            if time.time() - file.stat().st_mtime > KEPT_SECONDS:
                file.unlink(missing_ok=True)


def in_memory(pairs: Iterable[Pair]) -> ColumnsFile:
    """The table of some shards in the memory of this process.

    Raises:
        DataError: class `transport`, for more than MOST_IN_MEMORY samples.
    """
    stream = io.BytesIO()
    writer = TableWriter(stream, SUFFIX)
    for pair in pairs:
        writer.add(*pair)
        if writer.num_samples > MOST_IN_MEMORY:
            raise transport_error(
                f"the table of the index has over {MOST_IN_MEMORY:,} samples, which is too many "
                "for the memory of each process. Set data.index_dir to a folder with room for it"
            )
    writer.finish()
    view = stream.getbuffer()
    return ColumnsFile(lambda offset, length: bytes(view[offset:][:length]), len(view), SUFFIX)
