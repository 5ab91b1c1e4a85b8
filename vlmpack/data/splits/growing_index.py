"""The shards of a split whose index grows while the run goes on.

A shard is indexed and measured in one pass when a window first needs it, or earlier by a helper
process or another rank. They exchange only the parts in the index folder. So a helper that dies
costs time and nothing else, and every rank meets an error where it needs the shard.

A sample's number is `shard * SHARD_STRIDE + row`, whatever else is indexed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from vlmpack.data.config import DataConfig
from vlmpack.data.forkserver import signals_blocked, worker_context
from vlmpack.data.index.groups import group_numbers
from vlmpack.data.index.lengths import ShardBuilder, load_lengths
from vlmpack.data.index.parts import (
    POOL_MIN_BYTES,
    BuildPart,
    BuildSettings,
    Part,
    build_parts_together,
    build_unless_held,
    own_first,
    part_for,
    read_part,
)
from vlmpack.data.index.shard_index import load_index
from vlmpack.data.index.table import Fitted, Int64s, SampleRef, SampleTable, table_of
from vlmpack.data.index.table_file import in_memory, open_table
from vlmpack.data.loading.read import SkippedSample
from vlmpack.data.plan.packers import planned_samples
from vlmpack.data.shards.naming import describe_keys
from vlmpack.data.splits.indexed import fit_samples
from vlmpack.data.splits.summary import dropped_samples
from vlmpack.errors import VlmpackError, integrity_error
from vlmpack.packing.prefix_rows import PlannedSample
from vlmpack.storage.cache.cached import CachedFetcher
from vlmpack.storage.fetch import ShardStamp

CLOSE_SECONDS = 5.0
"""How long helpers have to exit. One that waits for a store misses the signal."""


class IndexHelpers:
    """The helper processes of one split."""

    def __init__(self) -> None:
        self._processes: list[BaseProcess] = []

    def start(self, parts: Sequence[Part], build: BuildPart, settings: BuildSettings) -> None:
        """Start to make parts and return."""
        self._processes = [process for process in self._processes if process.is_alive()]
        arguments = (parts, build, replace(settings, progress=None), os.getpid())
        with signals_blocked():
            process = worker_context(settings.preload).Process(  # type: ignore[attr-defined]
                target=_help, args=arguments, daemon=True
            )
            process.start()
        self._processes.append(process)

    def close(self) -> None:
        """End all helpers, by force after CLOSE_SECONDS."""
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._processes = []


def _help(parts: Sequence[Part], build: BuildPart, settings: BuildSettings, trainer: int) -> None:
    """A helper's work. A failure is repeated and reported by the process that needs the shard."""
    signal.signal(signal.SIGTERM, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    Path(settings.directory).mkdir(parents=True, exist_ok=True)
    with suppress(KeyboardInterrupt):
        for part in own_first(parts, settings):
            try:
                os.kill(trainer, 0)
            except ProcessLookupError:  # it was killed, and nobody waits for the rest
                return
            with suppress(VlmpackError):
                build_unless_held(part, build, "index")


def _leave(signum: int, frame: object) -> None:
    raise KeyboardInterrupt  # no fault of a source that is being read, as SystemExit would be


logger = logging.getLogger("vlmpack")

SHARD_STRIDE = 1 << 32
MAX_KEPT_ROWS = 1 << 17
HELPER_MIN_BYTES = 16 << 20
"""Less than this is indexed faster than a process starts."""


@dataclass(frozen=True, slots=True)
class ShardSamples:
    """One shard, indexed and measured."""

    fitted: Fitted
    numbers: Int64s


@dataclass(eq=False)
class GrowingIndex:
    """The known part of a split's index."""

    config: DataConfig
    stamps: Sequence[ShardStamp]
    builder: ShardBuilder
    settings: BuildSettings
    on_dropped: Callable[[Sequence[SkippedSample]], None] | None = None

    def __post_init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._met: set[int] = set()
        self._prints: dict[int, bytes] = {}
        self._named_keys: set[str] | None = None
        self._kept: dict[int, ShardSamples] = {}
        self._used: dict[int, int] = {}
        self._window = 0
        self._helpers = IndexHelpers()

    def numbers(self, shard: int) -> Int64s:
        """See windows.Shards.

        Raises:
            DataError: the shard cannot be indexed, or holds a sample that may not be skipped.
        """
        return self.samples(shard).numbers

    def count(self, shard: int) -> int | None:
        """See windows.Shards."""
        return self._counts.get(shard)

    @property
    def num_known(self) -> int:
        """Shards whose number of usable samples is known."""
        return len(self._counts)

    def samples(self, shard: int) -> ShardSamples:
        """A shard's samples, kept for the window that is planned now and the one before."""
        samples = self._kept.get(shard)
        if samples is None:
            samples = self._load(shard)
            self._check_print(shard, samples.fitted)
            self._kept[shard] = samples
            if shard not in self._met and self.on_dropped is not None:
                holes, first = dropped_samples(samples.fitted), shard * SHARD_STRIDE
                self.on_dropped([replace(hole, number=hole.number + first) for hole in holes])
            self._met.add(shard)
            self._name_new_keys(shard, samples.fitted.table)
            self._counts[shard] = samples.numbers.shape[0]
        self._used[shard] = self._window
        return samples

    def name_keys_from_now(self, named: Iterable[str]) -> None:
        """Name unknown keys in a log line when a shard first has them; `named` are known
        already."""
        self._named_keys = set(named)

    def _name_new_keys(self, shard: int, table: SampleTable) -> None:
        if self._named_keys is None:
            return
        new = {k: n for k, n in table.unknown_keys.items() if k not in self._named_keys}
        self._named_keys |= new.keys()
        if new:
            logger.warning(
                "%-14s keys of records that are not read, first met in %s: %s",
                "unknown keys",
                self.stamps[shard].path,
                describe_keys(new),
            )

    def fingerprint(self, shard: int) -> bytes:
        """See windows.Shards."""
        if shard not in self._prints:
            self.look_up(shard)
        return self._prints[shard]

    def _check_print(self, shard: int, fitted: Fitted) -> None:
        digest = hashlib.blake2b(digest_size=8)
        for column in (fitted.table.crc32s, fitted.table.num_tokens, fitted.eligible):
            digest.update(column[:].tobytes())
        digest.update(fitted.table.objects.encode())
        if self._prints.setdefault(shard, digest.digest()) != digest.digest():
            raise integrity_error(
                "its index changed while the run went on: it was made again with other samples or "
                "lengths",
                shard=self.stamps[shard].path,
            )

    def next_window(self) -> None:
        """See windows.Shards. Older windows' shards stay, up to MAX_KEPT_ROWS samples."""
        self._window += 1
        rows = sum(samples.fitted.table.num_samples for samples in self._kept.values())
        for shard in sorted(self._kept, key=lambda shard: self._used[shard]):
            if rows <= MAX_KEPT_ROWS or self._used[shard] >= self._window - 2:
                break
            rows -= self._kept.pop(shard).fitted.table.num_samples

    def look_up(self, shard: int) -> ShardSamples:
        """A shard's samples, without keeping them."""
        was_kept = shard in self._kept
        samples = self.samples(shard)
        if not was_kept:
            del self._kept[shard]
        return samples

    def glance_contents(self, shard: int) -> tuple[int, int]:
        """A shard's usable samples and their tokens, without keeping it."""
        fitted = self.look_up(shard).fitted
        return int(fitted.eligible.sum()), int(fitted.table.num_tokens[fitted.eligible].sum())

    def exact_count(self, shard: int) -> int:
        """How many usable samples a shard has; it is indexed first where it is not."""
        if shard not in self._counts:
            part = self.builder.lengths.part(self.stamps[shard])
            simple = self.config.data.over_long != "shrink_images" and self.config.share is None
            table = read_part(part.path) if simple else None
            if table is None:
                return int(self.look_up(shard).numbers.shape[0])
            fits = self.config.limits.fit(
                table.column("num_tokens").to_numpy(), table.column("num_patches").to_numpy()
            )
            self._counts[shard] = int(fits.sum())
        return self._counts[shard]

    def kept(self) -> list[Fitted]:
        """The samples of the shards that are in memory, in the split's order."""
        return [self._kept[shard].fitted for shard in sorted(self._kept)]

    def sizes(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """(n,) tokens and (n,) vision patches of samples."""
        return self.aligned_sizes(numbers, 1)

    def sequence_tokens(self, numbers: Int64s) -> Int64s:
        """See SampleTable."""
        each = 2 if self.builder.lengths.encoder.settings.pairs else 1
        tokens = np.empty((numbers.shape[0], each), dtype=np.int64)
        for table, where, rows in self._by_shard(numbers):
            tokens[where] = table.sequence_tokens(rows)
        return tokens

    def aligned_sizes(self, numbers: Int64s, alignment: int) -> tuple[Int64s, Int64s]:
        """See SampleTable."""
        tokens, patches = np.empty_like(numbers), np.empty_like(numbers)
        for table, where, rows in self._by_shard(numbers):
            tokens[where], patches[where] = table.aligned_sizes(rows, alignment)
        return tokens, patches

    def groups(self, numbers: Int64s) -> Int64s | None:
        """(n,) which samples of a source stand together; see SampleTable."""
        by = self.config.group_by
        is_grouped = by != "none"
        records, digests = numbers.copy(), np.zeros_like(numbers)
        for table, where, rows in self._by_shard(numbers):
            if table.branches is not None:
                records[where] -= np.maximum(table.branches[rows], 0)
                is_grouped = True
            if (own := table.digests(by)) is not None:
                digests[where] = own[rows]
        return group_numbers(records, digests) if is_grouped else None

    def planned(self, numbers: Int64s) -> list[PlannedSample]:
        """(n,) what is planned of samples that were measured for what they share."""
        samples: list[PlannedSample] = [()] * numbers.shape[0]
        for table, where, rows in self._by_shard(numbers):
            for place, sample in zip(where.tolist(), planned_samples(table, rows), strict=True):
                samples[place] = sample
        return samples

    def _by_shard(self, numbers: Int64s) -> Iterator[tuple[SampleTable, Int64s, Int64s]]:
        """(table, places in `numbers`, rows of the table) of each shard that has some of them."""
        shards, rows = np.divmod(numbers, SHARD_STRIDE)
        for shard in np.unique(shards).tolist():
            places = np.flatnonzero(shards == shard)
            yield self.samples(shard).fitted.table, places, rows[places]

    def ref(self, number: int) -> SampleRef:
        """What a worker needs of one sample."""
        shard, row = divmod(number, SHARD_STRIDE)
        return replace(self.samples(shard).fitted.table.ref(row), number=number)

    def make(self, shards: Sequence[int]) -> None:
        """See windows.Shards. Other ranks that want the same shards make some of them.

        Raises:
            DataError: as `numbers`.
        """
        self._fetch_ahead(shards[1:])
        if sum(self.stamps[shard].size for shard in shards) >= POOL_MIN_BYTES:
            self.make_ahead(shards[1:])
        parts = [self._part(shard) for shard in shards]
        build_parts_together(parts, self.builder, self.settings, what="index")
        for shard in shards:
            self.samples(shard)

    def make_ahead(self, shards: Sequence[int]) -> None:
        """See windows.Shards. A separate process does it, if starting one is worth it."""
        parts = [part for part in map(self._part, shards) if not Path(part.path).exists()]
        self._fetch_ahead([shard for shard in shards if self._part(shard) not in parts])
        if sum(part.stamp.size for part in parts) < HELPER_MIN_BYTES:
            return
        self._helpers.start(parts, self.builder, self.settings)

    def _fetch_ahead(self, shards: Sequence[int]) -> None:
        """Download shards to the cache before they are read, while the reader works."""
        fetcher = self.builder.fetcher
        if isinstance(fetcher, CachedFetcher):
            # Ranks begin at different ones.
            first = self.settings.rank * len(shards) // self.settings.world_size
            fetcher.prefetch([self.stamps[shard] for shard in [*shards[first:], *shards[:first]]])

    def make_all(self) -> None:
        """Indexes every shard, as a split is indexed that is planned as a whole.

        Raises:
            DataError: as `numbers`.
        """
        open_table(self.stamps, self.builder, self.settings)

    def made(self) -> Iterator[int]:
        """The shards that have their parts in the index folder."""
        return (shard for shard in range(len(self.stamps)) if self._is_made(shard))

    def all_made(self) -> bool:
        """Whether every shard has its parts in the index folder."""
        return all(map(self._is_made, range(len(self.stamps))))

    def _is_made(self, shard: int) -> bool:
        lengths_part = self.builder.lengths.part(self.stamps[shard])
        return Path(self._part(shard).path).exists() and Path(lengths_part.path).exists()

    def close(self) -> None:
        """End indexing and fetching ahead within seconds, whatever a store does."""
        if isinstance(self.builder.fetcher, CachedFetcher):
            self.builder.fetcher.stop_prefetch()
        self._helpers.close()

    def _part(self, shard: int) -> Part:
        return part_for(self.settings.directory, self.stamps[shard], self.builder.rule)

    def _load(self, shard: int) -> ShardSamples:
        part = self._part(shard)
        build_parts_together([part], self.builder, self.settings, what="index")
        index = load_index(part, self.builder)
        lengths = self.builder.lengths
        lengths_part = lengths.part(part.stamp)
        build_parts_together([lengths_part], lengths, self.settings, what="lengths")
        file = in_memory([(index, load_lengths(lengths_part, index, lengths))])
        fitted = fit_samples(self.config, self.builder, table_of(file, [[part.stamp]]))
        rows = np.flatnonzero(fitted.eligible).astype(np.int64)
        return ShardSamples(fitted, rows + shard * SHARD_STRIDE)
