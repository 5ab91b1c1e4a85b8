"""The index of many shards at once, for `vlmpack index`: one report a shard, faults included.

Shards whose part is there already are not read. A part appears whole or not at all, so the work
can be stopped at any time and goes on where it was.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import not_
from pathlib import Path

from vlmpack.data.files.samples import RecordFiles
from vlmpack.data.index.lengths import LengthsBuilder, ShardBuilder, measured
from vlmpack.data.index.parts import Part, part_for
from vlmpack.data.index.shard_index import PIECE_BYTES, IndexBuilder, load_index
from vlmpack.data.index.shard_pool import each_shard
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.encode import Encoder
from vlmpack.errors import DataError, VlmpackError, writing
from vlmpack.storage.fetch import Fetcher
from vlmpack.storage.sources import FoundShard

PRELOAD = ("vlmpack.data.tools.index_shards",)


@dataclass(slots=True)
class ShardReport:
    """One shard, as far as it could be read.

    Args:
        num_bytes: its size; 0 where it cannot be reached.
        was_read: whether a part of it was made now.
        first_bad: error class -> key and reason of the first of them.
        unknown_keys: keys of the records that are not read -> records.
    """

    path: str
    num_bytes: int = 0
    was_read: bool = False
    samples: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    first_bad: dict[str, tuple[str, str]] = field(default_factory=dict)
    unknown_keys: Mapping[str, int] = field(default_factory=dict)
    fault: VlmpackError | None = None


def parts_builder(
    fetcher: Fetcher, caps: SampleCaps, directory: Path, encoder: Encoder | None
) -> IndexBuilder:
    """What makes the parts of a shard: the index, and with an encoder the lengths too."""
    index = IndexBuilder(fetcher, caps, encoder is not None and encoder.each_answer)
    if encoder is None:
        return index
    return ShardBuilder.of(LengthsBuilder(index, directory, encoder))


@dataclass(frozen=True, slots=True)
class IndexOne:
    """Indexes one shard; picklable."""

    builder: IndexBuilder
    directory: Path

    def is_large(self, shard: FoundShard) -> bool:
        """Whether several processes can read it."""
        builder = self.builder
        try:
            stamp = shard.seen(builder.fetcher)
        except DataError:
            return False
        return RecordFiles(builder.fetcher, builder.caps).is_parted(stamp, PIECE_BYTES)

    def __call__(self, shard: FoundShard) -> ShardReport:
        """The report; a damaged shard is a report with a fault, no exception."""
        report = ShardReport(shard.path)
        try:
            self._fill(report, shard)
        except DataError as error:
            report.fault = error
        return report

    def _fill(self, report: ShardReport, shard: FoundShard) -> None:
        stamp = shard.seen(self.builder.fetcher)
        report.num_bytes = stamp.size
        parts = [part_for(self.directory, stamp, self.builder.rule)]
        if isinstance(self.builder, ShardBuilder):
            parts.append(self.builder.lengths.part(stamp))
        before = [_version(part) for part in parts]
        report.was_read = before[0] is None
        index = load_index(parts[0], self.builder)
        report.was_read = _version(parts[0]) != before[0]  # lengths may fail yet
        report.samples, report.unknown_keys = index.num_samples, index.unknown_keys
        rows = measured(index, self.builder)
        report.was_read = [_version(part) for part in parts] != before
        classes = rows.column("error_class").to_pylist()
        report.bad = dict(sorted(Counter(filter(None, classes)).items()))
        for name in report.bad:
            place = classes.index(name)
            key, reason = index.table.column("key")[place], rows.column("reason")[place]
            report.first_bad[name] = (key.as_py(), reason.as_py())


def _version(part: Part) -> tuple[int, int] | None:
    """Changes when the part is made (again); None where there is none."""
    try:
        status = os.stat(part.path)  # noqa: PTH116
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def index_shards(
    shards: Sequence[FoundShard],
    builder: IndexBuilder,
    directory: Path,
    *,
    processes: int,
    preload: tuple[str, ...] = (),
) -> Iterator[ShardReport]:
    """A report of every shard, as they finish. Large files of JSONL come first, each read by all
    processes.

    Args:
        shards: those with a version are not asked for it again.
        preload: modules that an encoder imports late, for the processes to begin with.

    Raises:
        VlmpackError: the folder cannot be written, or a process was killed.
    """
    with writing(f"--index-dir {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
    one = IndexOne(replace(builder, processes=processes), directory)
    large = [processes > 1 and one.is_large(shard) for shard in shards]
    yield from map(one, compress(shards, large))
    yield from each_shard(
        one,
        [*compress(shards, map(not_, large))],
        processes=processes,
        preload=(*PRELOAD, *preload),
        in_order=False,
        remedy="run `vlmpack index` again with fewer --processes; finished shards are kept",
    )
