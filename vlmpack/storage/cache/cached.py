"""A fetcher that keeps what it fetched from a store on a local disk, in blocks of a few MiB.

The stream that indexes a shard and the ranges of its samples share these blocks. So a shard that
was indexed is read from disk in training. The next epoch, run and other processes of the machine
find its blocks too, and neighbouring samples cost one request. A block's name is made of the
shard's path, version and size and its own place. A changed shard, or one in another folder, has
other blocks.

    samples asked for        [s1]   [s2]                [s3]
    blocks                 |      0      |      1      |      2      |
    missing: fetched whole   ^^^^^^^^^^^^^^^^^^^^^^^^^^^ in one request, kept, then cut

Local files and shards without a version are not cached.
"""

from __future__ import annotations

import io
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from vlmpack.addresses import is_remote
from vlmpack.errors import RecipeError, VlmpackError
from vlmpack.recipe.data import CacheSection
from vlmpack.storage.access import default_cache_dir
from vlmpack.storage.cache.block_store import (
    BlockStore,
    Bytes,
    ShardBlocks,
    Span,
    make_folder,
    runs,
)
from vlmpack.storage.fetch import ChunkStream, Fetcher, ShardStamp

logger = logging.getLogger("vlmpack")
REQUEST_BYTES = 32 << 20
"""The longest span of missing blocks that one request asks for, and that is held in memory."""
READ_AHEAD_BYTES = 16 << 20
"""Bytes fetched from a missing block on, where shards are used window by window."""
STREAM_BUFFER_BYTES = 256 << 10
MAX_BLOCKS_NOTED = 65_536
"""Blocks whose use is noted; the oldest are forgotten."""
WORTH_SHARE = 32
"""A block that had to go before a 32nd of it was used is not fetched whole again, until as many
bytes as it has were read by themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockUse:
    """How blocks are cut and fetched; follows from the run, a recipe does not say it."""

    block_bytes: int = 4 << 20
    """Size of one block."""
    read_ahead_bytes: int = 0
    """Bytes that are fetched with a missing block, from missing ones behind it. Pays where a
    shard's samples are used close together."""
    lock_timeout_seconds: float = 120.0
    """The longest wait for another process that fetches the same block."""


def block_dir(cache: CacheSection) -> Path:
    """The configured folder of the blocks, else `$VLMPACK_CACHE/blocks` or
    `~/.cache/vlmpack/blocks`."""
    return Path(cache.directory) if cache.directory else default_cache_dir().parent / "blocks"


@dataclass(slots=True)
class CacheCounters:
    """What this process's reads cost."""

    served_bytes: int = 0
    """Given to the reader."""
    fetched_bytes: int = 0
    """Asked of the store."""
    requests: int = 0
    """Ranges asked of the store."""
    damaged_blocks: int = 0
    """Found damaged on disk, and fetched again."""


class CachedFetcher:
    """Reads through blocks on disk; picklable, the counters stay behind.

    Raises:
        RecipeError: the directory cannot be written, or holds less than two blocks.
    """

    def __init__(self, inner: Fetcher, cache: CacheSection, use: BlockUse | None = None) -> None:
        use = BlockUse() if use is None else use
        if cache.max_bytes < 2 * use.block_bytes:
            raise RecipeError(
                f"data.cache.max_bytes: {cache.max_bytes}; at least two blocks of "
                f"{use.block_bytes} bytes, or 0 for no cache"
            )
        _check_writable(block_dir(cache))
        self.__setstate__((inner, cache, use))

    @property
    def counters(self) -> CacheCounters:
        """What the reads of this process cost so far."""
        self._counters.damaged_blocks = self._store.damaged
        return self._counters

    def head(self, path: str) -> ShardStamp:
        """See Fetcher."""
        return self.inner.head(path)

    def list_shards(self, prefix: str) -> list[ShardStamp]:
        """See Fetcher."""
        return self.inner.list_shards(prefix)

    def open(self, stamp: ShardStamp) -> BinaryIO:
        """See Fetcher."""
        if not _is_cached(stamp):
            return self.inner.open(stamp)
        shard = self._shard(stamp)
        raw = ChunkStream(self._stream(shard))
        return cast(BinaryIO, io.BufferedReader(raw, STREAM_BUFFER_BYTES))

    def prefetch(self, stamps: Sequence[ShardStamp]) -> None:
        """Start to fetch whole shards to the disk, in order, and return.

        Errors are left to the reader. Shards above half of the cache are skipped. A new call drops
        what an earlier one still had to do.
        """
        remote = [stamp for stamp in stamps if _is_cached(stamp)]
        if remote and 2 * sum(stamp.size for stamp in remote) <= self.cache.max_bytes:
            self._background.start(remote)

    def stop_prefetch(self) -> None:
        """Drops what `prefetch` still had to do."""
        self._background.stop()

    def fetch_shard(self, stamp: ShardStamp) -> None:
        """Brings what is missing of a shard to the disk.

        Raises:
            DataError: as `read`.
        """
        shard = self._shard(stamp)
        missing = [n for n in range(shard.count) if not self._store.has(shard.name(n))]
        group = max(1, self.use.read_ahead_bytes // shard.block_bytes)
        for at in range(0, len(missing), group):
            self.fetch_blocks(shard, missing[at : at + group])

    def read(self, stamp: ShardStamp, offset: int, length: int) -> bytes:
        """See Fetcher."""
        block, start = divmod(offset, self.use.block_bytes)
        end = start + length
        in_one_block = start < end <= self.use.block_bytes and end <= stamp.size - offset + start
        if in_one_block and offset >= 0 and _is_cached(stamp):  # most samples
            shard = self._shard(stamp)
            name = shard.name(block)
            data = self._store.read(name, shard.size(block), start, end)
            if data is not None:
                self._note_used(name, length)
                return data
        return self.read_ranges(stamp, [(offset, length)])[0]

    def read_ranges(self, stamp: ShardStamp, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See Fetcher."""
        inside = all(0 <= offset <= offset + length <= stamp.size for offset, length in ranges)
        if not _is_cached(stamp) or not inside:  # the inner fetcher says what is wrong
            return self.inner.read_ranges(stamp, ranges)
        shard = self._shard(stamp)
        spans = [shard.spans(offset, length) for offset, length in ranges]
        names = {span.block: shard.name(span.block) for several in spans for span in several}
        parts: dict[Span, bytes] = {}
        missing: list[Span] = []
        for span in sorted({span for several in spans for span in several}):
            block, start, end = span
            part = self._store.read(names[block], shard.size(block), start, end)
            if part is None:
                missing.append(span)
            else:
                parts[span] = part
        if missing:
            parts |= self._fetch_spans(shard, missing)
        for span, part in parts.items():
            self._note_used(names[span.block], len(part))
        return [b"".join(parts[span] for span in several) for several in spans]

    def fetch_blocks(self, shard: ShardBlocks, blocks: Sequence[int]) -> dict[int, Bytes]:
        """Whole blocks that were just missing. Another process may have fetched them since."""
        names = {block: shard.name(block) for block in blocks}
        whole: dict[int, Bytes] = {}
        timeout_seconds = self.use.lock_timeout_seconds
        with self._store.fetching(names.values(), timeout_seconds=timeout_seconds):
            for block in blocks:
                data = self._store.read(names[block], shard.size(block), 0, shard.size(block))
                if data is not None:
                    whole[block] = data
            spans = list(runs(block for block in blocks if block not in whole))
            bodies = self._request(shard.stamp, [shard.range_of_run(run) for run in spans])
            for run, body in zip(spans, bodies, strict=True):
                for place, block in enumerate(run):
                    start = place * shard.block_bytes
                    whole[block] = memoryview(body)[start : start + shard.size(block)]
                    self._store.write(names[block], whole[block])
                    self._note_fetched(names[block])
        return whole

    def _with_missing_behind(self, shard: ShardBlocks, block: int, max_bytes: int) -> list[int]:
        """A missing block and the missing ones right behind it, `max_bytes` at most."""
        last = min(block + max(1, max_bytes // shard.block_bytes), shard.count)
        blocks = [block]
        while blocks[-1] + 1 < last and not self._store.has(shard.name(blocks[-1] + 1)):
            blocks.append(blocks[-1] + 1)
        return blocks

    def _stream(self, shard: ShardBlocks) -> Generator[Bytes]:
        """A whole shard, block after block."""
        loaded: dict[int, Bytes] = {}
        for block in range(shard.count):
            if block not in loaded:
                loaded = self._stream_block(shard, block)
            yield loaded.pop(block)

    def _stream_block(self, shard: ShardBlocks, block: int) -> dict[int, Bytes]:
        """A block from disk; or fetched, with the missing ones behind it."""
        name, size = shard.name(block), shard.size(block)
        data = self._store.read(name, size, 0, size)
        whole: dict[int, Bytes] = {block: data} if data is not None else {}
        if not whole:
            whole = self.fetch_blocks(shard, self._with_missing_behind(shard, block, REQUEST_BYTES))
        for number, found in whole.items():
            self._note_used(shard.name(number), len(found))
        return whole

    def _fetch_spans(self, shard: ShardBlocks, missing: list[Span]) -> dict[Span, bytes]:
        """Spans of missing blocks, which are fetched whole in bounded groups.

        Where a block had to go before it was much used, the cache is too small. Then only the span
        itself is read.
        """
        direct = [span for span in missing if not self._is_worth_it(shard, span.block)]
        spans: dict[Span, bytes] = {}
        if direct:
            bodies = self._request(shard.stamp, [shard.range_of(span) for span in direct])
            spans.update(zip(direct, bodies, strict=True))
            for block, start, end in direct:  # they count for a 32nd, until they add up to a block
                if (name := shard.name(block)) in self._used:
                    self._used[name] -= (end - start) * (WORTH_SHARE - 1) // WORTH_SHARE
        ahead = self.use.read_ahead_bytes
        starts = {span.block for span in missing if span not in spans}
        todo = sorted(
            {b for start in starts for b in self._with_missing_behind(shard, start, ahead)}
        )
        group = max(1, REQUEST_BYTES // shard.block_bytes)
        for at in range(0, len(todo), group):
            whole = self.fetch_blocks(shard, todo[at : at + group])
            for span in missing:
                if span.block in whole:
                    spans[span] = bytes(whole[span.block][span.start : span.end])
        return spans

    def _request(self, stamp: ShardStamp, ranges: list[tuple[int, int]]) -> list[bytes]:
        if not ranges:
            return []
        self._counters.fetched_bytes += sum(length for _, length in ranges)
        self._counters.requests += len(ranges)
        return self.inner.read_ranges(stamp, ranges)

    def _is_worth_it(self, shard: ShardBlocks, block: int) -> bool:
        used = self._used.get(shard.name(block))
        return used is None or used * WORTH_SHARE >= shard.size(block)

    def _note_fetched(self, name: str) -> None:
        self._used[name] = 0
        while len(self._used) > MAX_BLOCKS_NOTED:
            self._used.pop(next(iter(self._used)), None)

    def _note_used(self, name: str, count: int) -> None:
        self._counters.served_bytes += count
        if name in self._used:
            self._used[name] += count

    def _shard(self, stamp: ShardStamp) -> ShardBlocks:
        return ShardBlocks(stamp, self.use.block_bytes)

    def __getstate__(self) -> tuple[Fetcher, CacheSection, BlockUse]:
        return self.inner, self.cache, self.use

    def __setstate__(self, state: tuple[Fetcher, CacheSection, BlockUse]) -> None:
        self.inner, self.cache, self.use = state
        self._counters = CacheCounters()
        self._store = BlockStore(block_dir(self.cache), self.cache.max_bytes)
        self._background = BackgroundFetch(self.fetch_shard)
        self._used: dict[str, int] = {}  # bytes used of each block that this process fetched


def _is_cached(stamp: ShardStamp) -> bool:
    """Remote, and with a version, so that a changed shard is another one."""
    return is_remote(stamp.path) and bool(stamp.version)


def _check_writable(directory: Path) -> None:
    reason = "it is not writable"
    try:
        make_folder(directory)
        if os.access(directory, os.W_OK | os.X_OK):
            return
    except OSError as error:
        reason = error.strerror or str(error)
    raise RecipeError(
        f"data.cache.directory: {directory} cannot be used ({reason}); name a folder on a "
        "local disk, or set data.cache.max_bytes: 0 for no cache"
    )


class BackgroundFetch:
    """Calls `fetch` for shard after shard, in a thread that ends when there is nothing to do."""

    def __init__(self, fetch: Callable[[ShardStamp], None]) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._todo: deque[ShardStamp] = deque()
        self._thread: threading.Thread | None = None

    def start(self, stamps: Sequence[ShardStamp]) -> None:
        """Fetches these next, instead of what an earlier call still had to do."""
        with self._lock:
            self._todo = deque(stamps)
            if self._thread is None and self._todo:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Drops what is still to do; a shard that is being fetched ends by itself."""
        with self._lock:
            self._todo.clear()

    def wait(self) -> None:
        """Until nothing is left to do."""
        while (thread := self._thread) is not None:
            thread.join()

    def _run(self) -> None:
        try:
            while (stamp := self._next()) is not None:
                self._fetch_one(stamp)
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _next(self) -> ShardStamp | None:
        with self._lock:
            if self._todo:
                return self._todo.popleft()
            self._thread = None  # under the lock: whoever adds work now starts another thread
            return None

    def _fetch_one(self, stamp: ShardStamp) -> None:
        try:
            self._fetch(stamp)
        except VlmpackError as error:  # whoever reads the shard meets it again, and says so
            logger.debug("%s was not fetched ahead: %s", stamp.path, error)
        except RuntimeError:
            if threading.main_thread().is_alive():
                raise
            self.stop()  # the process ends, and no thread can be started any more
