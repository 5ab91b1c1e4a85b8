"""Derived facts about shards, kept as one file per shard: written once, and always whole.

    a part        <parquet bytes> <BLAKE2b-128 of the file's name and of these bytes>

It is written and read row group by row group, so a large one takes little memory.

A part's name has the shard's path, size and version, and the rule that made it. So a changed shard
simply has no part yet. Parquet's own checksums leave out its footer, where one flipped bit can drop
rows. So the digest is checked before a part is parsed.

Parts appear by rename. They are not flushed to the disk, since one that a power cut tears is
damaged, and made again. Where all shards are needed at once, one process builds what is missing
(`build_parts`). During a run every process builds some (`build_parts_together`). The others wait
for the files, outside any collective. They take over when the builder dies, since the kernel
releases its lock. A warm launch opens one file in their place (`table_file`).
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from vlmpack.activity import ACTIVITY
from vlmpack.data.forkserver import DEFAULT_PRELOAD
from vlmpack.data.index.shard_pool import each_shard
from vlmpack.errors import (
    DataError,
    VlmpackError,
    integrity_error,
    refuse_full_table,
    transport_error,
)
from vlmpack.file_format import FORMAT, INDEX
from vlmpack.storage.access import default_cache_dir
from vlmpack.storage.fetch import ShardStamp
from vlmpack.whole_file import written_whole

SUFFIX = ".part"
"""No parquet reader takes such a file as it is, so it is not called one."""
SEAL_BYTES = 16
WHOLE_BYTES = 4 << 20
"""A part of at most so many bytes is read at once; of a larger one, one row group at a time."""
_FORMAT = FORMAT.encode()


class PartWriter:
    """Writes a part's row groups as they come.

    Args:
        facts: kept with the rows; the metadata of each table are added to them.
    """

    def __init__(self, stream: BinaryIO, path: str) -> None:
        self.facts: dict[bytes, bytes] = {_FORMAT: str(INDEX.number).encode()}
        self._stream, self._seal = stream, _seal_of(path)
        self._tables: Any = None

    def add(self, table: Any) -> None:
        """A pyarrow table, whose rows are a row group."""
        if self._tables is None:
            sink = pa.PythonFile(self, "w")
            self._tables = pq.ParquetWriter(
                sink, table.schema.remove_metadata(), compression="zstd"
            )
        self.facts |= table.schema.metadata or {}
        self._tables.write_table(table.replace_schema_metadata(None))

    def finish(self) -> None:
        """Writes the facts and the seal."""
        self._tables.add_key_value_metadata(self.facts)
        self._tables.close()
        self._stream.write(self._seal.digest())

    closed = False

    def write(self, data: bytes) -> int:
        """See BinaryIO; called by pyarrow."""
        self._seal.update(data)
        return self._stream.write(data)

    def flush(self) -> None:
        """See BinaryIO."""


@contextmanager
def part_writer(path: str) -> Iterator[PartWriter]:
    """Writes a part atomically: temporary file, rename.

    Raises:
        DataError: class `transport`, where the folder cannot be written.
    """
    try:
        with written_whole(Path(path), flush=False) as stream:
            writer = PartWriter(stream, path)
            yield writer
            writer.finish()
    except OSError as error:
        raise unwritable(path, error) from error


def write_part(path: str, table: Any, metadata: dict[bytes, bytes]) -> None:
    """A part of one row group.

    Raises:
        DataError: as `part_writer`.
    """
    with part_writer(path) as writer:
        writer.add(table.replace_schema_metadata(metadata))


class _Body(io.RawIOBase):
    """A part's bytes in front of its seal."""

    def __init__(self, stream: Any, size: int) -> None:
        self._stream, self._size = stream, size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            offset, whence = self._size + offset, os.SEEK_SET
        return int(self._stream.seek(offset, whence))

    def tell(self) -> int:
        return int(self._stream.tell())

    def read(self, size: int = -1) -> bytes:
        left = self._size - self._stream.tell()
        data: bytes = self._stream.read(left if size < 0 else min(size, left))
        return data


@dataclass(frozen=True, slots=True)
class PartRows:
    """The rows of a part that is as it was written.

    Args:
        facts: what its writer said of them.
        first: its first row group, a pyarrow table.
    """

    path: str
    file: Any
    facts: Mapping[bytes, bytes]
    first: Any

    @property
    def group_sizes(self) -> list[int]:
        """Rows of each row group."""
        sizes = self.file.metadata
        return [sizes.row_group(n).num_rows for n in range(sizes.num_row_groups)]

    @property
    def num_rows(self) -> int:
        """All of them."""
        return int(self.file.metadata.num_rows)

    def groups(self) -> Iterator[Any]:
        """The row groups as pyarrow tables, one in memory at a time.

        Raises:
            DataError: class `integrity`: the file was cut meanwhile, or its disk is failing.
        """
        yield self.first
        for number in range(1, self.file.num_row_groups):
            try:
                group = self.file.read_row_group(number, use_threads=False)
            except (OSError, pa.ArrowException) as error:
                raise integrity_error(
                    f"the index file {self.path} cannot be read any more ({error}). Start again, "
                    "and it is made again"
                ) from error
            yield group.replace_schema_metadata(self.facts)

    def table(self) -> Any:
        """All rows as a pyarrow table.

        Raises:
            DataError: as `groups`.
        """
        return pa.concat_tables(self.groups())


def open_part(path: str) -> PartRows | None:
    """The rows of a part; None where it is missing or damaged, so that it is remade.

    Its bytes are compared with the seal. Those of a large part are not kept in memory.
    """
    try:
        stream = pa.OSFile(path)
        size = stream.size()
        found, content = _seal_of(path), b""
        for left in range(size - SEAL_BYTES, 0, -WHOLE_BYTES):
            content = stream.read(min(left, WHOLE_BYTES))
            found.update(content)
        sealed = stream.read() == found.digest()
    except FileNotFoundError:
        return None
    except OSError as error:
        refuse_full_table(error)
        logger.warning("the index file %s cannot be read (%s); it is made again", path, error)
        return None
    if sealed:
        body = size - SEAL_BYTES
        source = pa.BufferReader(content) if body <= WHOLE_BYTES else _Body(stream, body)
        try:
            file = pq.ParquetFile(source)
            some = file.num_row_groups > 1
            first = (
                file.read_row_group(0, use_threads=False) if some else file.read(use_threads=False)
            )
        except (OSError, pa.ArrowException):
            pass  # sealed by a pyarrow that wrote what this one does not read
        else:
            facts = file.metadata.metadata or {}
            rows = PartRows(path, file, facts, first.replace_schema_metadata(facts))
            return rows if _has_the_format(facts, path) else None
    logger.warning(
        "the index file %s is damaged: its %d bytes are not those that were written; it is made "
        "again",
        path,
        size,
    )
    return None


def read_part(path: str) -> Any | None:
    """All rows of a part as a pyarrow table; None as `open_part`."""
    rows = open_part(path)
    return None if rows is None else rows.table()


def _has_the_format(facts: Mapping[bytes, bytes], path: str) -> bool:
    """Whether this version reads a part; a line says where it does not, since it is made again."""
    number = facts.get(_FORMAT)
    refusal = INDEX.refusal(None if number is None else int(number), f"the index file {path}")
    if refusal is not None:
        logger.warning("%s; it is made again now", refusal)
    return refusal is None


def unwritable(path: str, error: OSError, what: str = "the index") -> DataError:
    """Why a part cannot be kept."""
    return transport_error(
        f"{what} cannot be written to {path}: {error.strerror or error}; set data.index_dir "
        "(or VLMPACK_CACHE) to a folder that can be written"
    )


def seal(path: str, data: bytes | memoryview) -> bytes:
    """Ties a part's bytes to its name."""
    digest = _seal_of(path)
    digest.update(data)
    return digest.digest()


def _seal_of(path: str) -> hashlib.blake2b:
    name = path.rpartition("/")[2].encode(errors="surrogateescape")
    return hashlib.blake2b(name, digest_size=SEAL_BYTES, person=b"vlmpack.part")


logger = logging.getLogger("vlmpack")

POOL_MIN_PARTS = 8
POOL_MIN_BYTES = 512 << 20
PART_BYTES = 512 << 10
"""A part takes as long as so many bytes, however small its shard is."""
POLL_SECONDS = 0.2
SHARE_POLL_SECONDS = 0.02

Progress = Callable[[str, int, int], None]
"""Called with what is being made, how many parts are done, and how many there are."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file of the cache, which may not exist yet."""

    stamp: ShardStamp
    path: str


class BuildPart(Protocol):
    """Makes one part; picklable, since it may run in another process."""

    def __call__(self, part: Part) -> None:
        """Writes `part.path` by `write_part`, or raises a VlmpackError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildSettings:
    """How parts are made; none of it changes what they hold."""

    directory: Path = field(default_factory=lambda: default_cache_dir())
    """Where they lie."""
    max_processes: int = 1
    """Processes that make them, where there are many or large shards."""
    stall_timeout_seconds: float = 1800.0
    """The longest wait for another process that makes them, without a new part."""
    preload: tuple[str, ...] = DEFAULT_PRELOAD
    """Modules that the processes are forked with."""
    progress: Progress | None = None
    """Told how far the work is."""
    rank: int = 0
    """Which process of `world_size` this is, so with which parts it begins."""
    world_size: int = 1


def part_for(directory: Path, stamp: ShardStamp, rule: str) -> Part:
    """The part that `rule` (a name with a version, such as "index-1") makes of a shard."""
    place = hashlib.blake2b(stamp.path.encode(), digest_size=8).hexdigest()
    version = hashlib.blake2b(
        f"{stamp.size}|{stamp.version}|{rule}{stamp.form}".encode(), digest_size=8
    ).hexdigest()
    # As Path.stem, which takes seconds for 50,000 shards.
    name = stamp.path.rpartition("/")[2]
    dot = name.rfind(".")
    stem = (name[:dot] if 0 < dot < len(name) - 1 else name)[:40]
    kind = rule.split("-", 1)[0]
    return Part(stamp, f"{directory}/{stem}.{place}.{version}.{kind}{SUFFIX}")


def load_part(part: Part, build: BuildPart, fits: Callable[[PartRows], bool]) -> PartRows:
    """The part's rows, made again where it is missing, damaged or does not fit.

    Raises:
        VlmpackError: what `build` raised.
        DataError: class `integrity`, where the new part does not read back.
    """
    rows = open_part(part.path)
    if rows is None or not fits(rows):
        build(part)
        rows = open_part(part.path)
    if rows is None or not fits(rows):
        raise integrity_error(
            f"the index file {part.path} was written a moment ago and does not read back. Its "
            "disk is failing, or another process writes there. Set data.index_dir to another "
            "folder",
            shard=part.stamp.path,
        )
    return rows


class _Patience:
    """The wait for parts that other processes make, which starts anew with each of them."""

    def __init__(self, settings: BuildSettings, what: str, total: int) -> None:
        self.seconds, self.what, self.total = settings.stall_timeout_seconds, what, total
        self.deadline, self.left = time.monotonic() + self.seconds, total + 1

    def note(self, left: Sequence[Part], holder: str | None, shard: str | None = None) -> None:
        """These are still missing. `holder` makes them, or None where this process made one.

        Raises:
            DataError: class `transport`: none appeared for too long.
        """
        if len(left) < self.left or holder is None:
            self.deadline, self.left = time.monotonic() + self.seconds, len(left)
            ACTIVITY.moved()
        elif time.monotonic() > self.deadline:
            raise transport_error(
                f"waited {self.seconds:.0f} s for {self.what}: {len(left)} of {self.total} parts "
                f"in {Path(left[0].path).parent} are missing and {holder} makes no progress",
                shard=shard,
            )


def build_parts(
    parts: Sequence[Part], build: BuildPart, settings: BuildSettings, *, what: str
) -> None:
    """Make every part that is missing, or wait until another process has made it.

    Raises:
        VlmpackError: what `build` raised for the first failing shard in order (other parts are
            kept); or no new part appeared for `stall_timeout_seconds`.
    """
    total, patience = len(parts), _Patience(settings, what, len(parts))
    while missing := [part for part in parts if not Path(part.path).exists()]:
        folder = Path(missing[0].path).parent
        _make_folder(folder)
        with _lock(folder / f"{what}-{_names_digest(parts)}.lock") as holder:
            if holder is None:
                missing = [part for part in missing if not Path(part.path).exists()]
                _build_missing(missing, build, settings, what=what, total=total)
                return
        patience.note(missing, holder)
        time.sleep(POLL_SECONDS)


def build_parts_together(
    parts: Sequence[Part], build: BuildPart, settings: BuildSettings, *, what: str
) -> None:
    """Make every missing part, together with other processes that need some of them.

    Each process begins with its own parts (every `world_size`-th), then takes parts that nobody is
    making. It waits for parts that others make. In separate folders each process makes all parts.

    Raises:
        VlmpackError: what `build` raised for its first failing part; or others hold the remaining
            parts, and none appeared for `stall_timeout_seconds`.
    """
    ordered, patience = own_first(parts, settings), _Patience(settings, what, len(parts))
    while missing := [part for part in ordered if not Path(part.path).exists()]:
        _make_folder(Path(missing[0].path).parent)
        holders = [build_unless_held(part, build, what) for part in missing]
        patience.note(missing, None if None in holders else holders[0], missing[0].stamp.path)
        if None not in holders:
            time.sleep(SHARE_POLL_SECONDS)


def own_first(parts: Sequence[Part], settings: BuildSettings) -> list[Part]:
    """The parts with every `world_size`-th in front, from this process's on."""
    places = range(len(parts))
    own, count = settings.rank, settings.world_size
    return [parts[place] for place in sorted(places, key=lambda n: (n % count != own, n))]


def build_unless_held(part: Part, build: BuildPart, what: str) -> str | None:
    """The other process that makes this part (or one with the same lock); None once it exists."""
    if Path(part.path).exists():
        return None
    slot = int.from_bytes(hashlib.blake2b(part.path.encode(), digest_size=1).digest(), "little")
    with _lock(Path(part.path).parent / f"{what}-part-{slot:02x}.lock") as holder:
        if holder is None and not Path(part.path).exists():
            build(part)
        return holder


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(str(folder), error) from error


def _build_missing(
    missing: Sequence[Part], build: BuildPart, settings: BuildSettings, *, what: str, total: int
) -> None:
    progress = settings.progress
    done = total - len(missing)
    faults: dict[int, VlmpackError] = {}
    if progress is not None and missing:
        progress(what, done, total)
    for place, fault in _run(missing, build, settings):
        if fault is not None:
            faults[place] = fault
            continue
        done += 1
        if progress is not None:
            progress(what, done, total)
    if faults:
        raise _first_fault(faults)


def _first_fault(faults: dict[int, VlmpackError]) -> VlmpackError:
    first = faults[min(faults)]
    if len(faults) == 1 or not isinstance(first, DataError):
        return first
    others = [
        str(fault.shard)
        for place, fault in sorted(faults.items())[1:6]
        if isinstance(fault, DataError)
    ]
    return first.reworded(
        f"{first.reason} (and {len(faults) - 1} more shards are faulty: {', '.join(others)})"
    )


def _run(
    parts: Sequence[Part], build: BuildPart, settings: BuildSettings
) -> Iterator[tuple[int, VlmpackError | None]]:
    """(place, fault) of each part as it finishes; a pool only where the work is worth its start."""
    large = sum(part.stamp.size + PART_BYTES for part in parts) >= POOL_MIN_BYTES
    processes = min(settings.max_processes, len(parts))
    if len(parts) < POOL_MIN_PARTS or not large:
        processes = 1
    yield from each_shard(
        partial(_attempt, build),
        list(enumerate(parts)),
        processes=processes,
        preload=settings.preload,
        in_order=False,
        remedy="finish the index first, by `vlmpack index --recipe` with fewer --processes",
    )


def _attempt(build: BuildPart, numbered: tuple[int, Part]) -> tuple[int, VlmpackError | None]:
    place, part = numbered
    try:
        build(part)
    except VlmpackError as fault:
        return place, fault
    return place, None


@contextmanager
def _lock(path: Path) -> Iterator[str | None]:
    """Yields None to the holder, else the holder's name. The lock dies with its process."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        refuse_full_table(error)
        raise unwritable(str(path), error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            yield holder or "another process"
            return
        except OSError:
            pass  # A file system without locks: work done twice is still written atomically.
        with suppress(OSError):  # a full disk: the holder fails at its own file, which is named
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield None
    finally:
        os.close(descriptor)


def _names_digest(parts: Sequence[Part]) -> str:
    names = "\n".join(sorted(part.path for part in parts))
    return hashlib.blake2b(names.encode(), digest_size=8).hexdigest()


Fits = Callable[[int, PartRows], bool]
"""Whether the part at a place is what is wanted."""


def open_parts(
    parts: Sequence[Part], build: BuildPart, settings: BuildSettings, fits: Fits, *, what: str
) -> list[PartRows]:
    """The rows of all parts, each made where it is missing or damaged.

    Raises:
        VlmpackError: what `build` raised for the first shard in order that failed; or others make
            the parts and make no progress.
        DataError: class `integrity`, where a new part does not read back.
    """
    build_parts(parts, build, settings, what=what)
    return [load_part(part, build, partial(fits, place)) for place, part in enumerate(parts)]
