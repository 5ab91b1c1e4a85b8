"""The index of many shards at once, for `vlmpack index`: one report a shard, faults included.

Shards whose part is there already are not read. A part appears whole or not at all, so the work
can be stopped at any time and goes on where it was.

The reports are kept, with the size and time of each part. Later the folder is listed once, and
parts that are as they were are not opened. Who reads a part checks its digest.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import compress
from operator import not_
from pathlib import Path

import pyarrow as pa

from vlmpack.addresses import is_remote
from vlmpack.data.files.samples import RecordFiles
from vlmpack.data.index.lengths import LengthsBuilder, ShardBuilder, measured
from vlmpack.data.index.parts import Part, part_for, read_part, write_part
from vlmpack.data.index.shard_index import PIECE_BYTES, IndexBuilder, load_index
from vlmpack.data.index.shard_pool import each_shard
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.encode import Encoder
from vlmpack.errors import DataError, VlmpackError, or_error, writing
from vlmpack.storage.fetch import HEADS_AT_ONCE, Fetcher, ShardStamp, at_once
from vlmpack.storage.sources import FoundShard

PRELOAD = ("vlmpack.data.tools.index_shards",)
LEAST_KEPT = 16
"""Reports of fewer shards are not kept, since their parts are opened as fast."""
REPORTS_RULE = "reports-1"
"""Changes whenever a ShardReport does."""
logger = logging.getLogger("vlmpack")


@dataclass(slots=True)
class ShardReport:
    """One shard, as far as it could be read.

    Args:
        num_bytes: its size; 0 where it cannot be reached.
        was_read: whether a part of it was made now.
        first_bad: error class -> key and reason of the first of them.
        unknown_keys: keys of the records that are not read -> records.
        parts: path of each part -> its version.
        stamp: its version; None where it cannot be reached. It is not kept.
    """

    path: str
    num_bytes: int = 0
    was_read: bool = False
    samples: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    first_bad: dict[str, tuple[str, str]] = field(default_factory=dict)
    unknown_keys: Mapping[str, int] = field(default_factory=dict)
    fault: VlmpackError | None = None
    parts: dict[str, list[int] | None] = field(default_factory=dict)
    stamp: ShardStamp | None = None


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

    @property
    def rules(self) -> list[str]:
        """The rules of a shard's parts."""
        lengths = [self.builder.lengths.rule] if isinstance(self.builder, ShardBuilder) else []
        return [self.builder.rule, *lengths]

    def parts(self, stamp: ShardStamp) -> list[Part]:
        """The parts of a shard, which may not exist yet."""
        return [part_for(self.directory, stamp, rule) for rule in self.rules]

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
        report.num_bytes, report.stamp = stamp.size, stamp
        parts = self.parts(stamp)
        before = [_version(part) for part in parts]
        report.was_read = before[0] is None
        index = load_index(parts[0], self.builder)
        report.was_read = _version(parts[0]) != before[0]  # lengths may fail yet
        report.samples, report.unknown_keys = index.num_samples, index.unknown_keys
        rows = measured(index, self.builder)
        report.parts = {part.path: _version(part) for part in parts}
        report.was_read = [*report.parts.values()] != before
        bad = Counter[str]()
        for group, of_group in zip(index.rows.groups(), rows.groups(), strict=True):
            classes = of_group.column("error_class")
            if classes.null_count == group.num_rows:
                continue
            classes = classes.to_pylist()
            bad.update(filter(None, classes))
            for name in bad.keys() - report.first_bad.keys():
                place = classes.index(name)
                key, reason = group.column("key")[place], of_group.column("reason")[place]
                report.first_bad[name] = (key.as_py(), reason.as_py())
        report.bad = dict(sorted(bad.items()))


def _version(part: Part | os.DirEntry[str]) -> list[int] | None:
    """Changes when the part is made (again); None where there is none."""
    try:
        status = os.stat(part.path)  # noqa: PTH116
    except OSError:
        return None
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def _kept(path: str, directory: Path) -> dict[str, ShardReport]:
    """Path of a shard -> its report, if its parts are as they were. The folder is listed once."""
    table = read_part(path)
    rows = [] if table is None else json.loads(table.column("reports")[0].as_py())
    reports = [ShardReport(**row) for row in rows]
    parts = {part for report in reports for part in report.parts}
    with os.scandir(directory) as listed:
        found = {each.path: _version(each) for each in listed if each.path in parts}
    return {each.path: each for each in reports if each.parts.items() <= found.items()}


def _keep(path: str, reports: Iterable[ShardReport]) -> None:
    """Failing is no error, since the parts say the same."""
    rows = json.dumps([asdict(replace(report, was_read=False, stamp=None)) for report in reports])
    try:
        write_part(path, pa.table({"reports": [rows]}), {})
    except DataError as error:
        logger.warning("the next `vlmpack index` opens each index file again: %s", error)


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
    if len(shards) < LEAST_KEPT:
        yield from _index(one, shards, processes, preload)
        return
    folder = shards[0].path.rpartition("/")[0]
    kept_rule = "-".join([REPORTS_RULE, *one.rules])
    kept_path = part_for(directory, ShardStamp(folder, 0, ""), kept_rule).path
    kept = _kept(kept_path, directory)
    look = partial(or_error, lambda shard: shard.seen(builder.fetcher))
    asks = any(is_remote(shard.path) and shard.stamp is None for shard in shards)
    stamps = at_once(look, shards, most=HEADS_AT_ONCE) if asks else map(look, shards)
    left = []
    for shard, stamp in zip(shards, stamps, strict=True):
        report = kept.get(shard.path)
        if isinstance(stamp, DataError):  # it is asked again, for its report
            left.append(shard)
        elif report and report.parts.keys() == {part.path for part in one.parts(stamp)}:
            yield replace(report, stamp=stamp)
        else:
            left.append(replace(shard, stamp=stamp))
    for report in _index(one, left, processes, preload):
        if report.fault is None:
            kept[report.path] = report
        yield report
    if left:
        _keep(kept_path, kept.values())


def _index(
    one: IndexOne, shards: Sequence[FoundShard], processes: int, preload: tuple[str, ...]
) -> Iterator[ShardReport]:
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
