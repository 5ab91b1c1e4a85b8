"""From single requests to exact reads: retries, resumed bodies, neighbours in one request.

asked for    [ a ][ b ]   [ c ]                              [ d .............. ]
spans        [ a   b      c   ]                              [ d .............. ]
requests     [ one            ]                              [ one ][ two ][ thr]   at once

While a request waits, the watchdog can say for which shard and how much has come.

`RoutingFetcher` sends every address to the fetcher of its scheme: local files, object stores, HTTP
servers, the hub.
"""

from __future__ import annotations

import io
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from importlib import import_module
from operator import itemgetter
from typing import BinaryIO, cast

from vlmpack.activity import ACTIVITY
from vlmpack.addresses import SCHEMES, redacted, scheme_of
from vlmpack.errors import CapabilityError, RecipeError, integrity_error, transport_error
from vlmpack.recipe.data import StorageSection, unsafe_storage
from vlmpack.recipe.problems import key_name
from vlmpack.storage.access import MAX_CONCURRENT_READS, place_of
from vlmpack.storage.fetch import (
    READ_BUFFER_BYTES,
    ChunkStream,
    LocalFetcher,
    ShardStamp,
    T,
    at_once,
)
from vlmpack.storage.transport import (
    NOTICE_SECONDS,
    SlowNotice,
    StoreFault,
    Transient,
    Transport,
    Tries,
)

NOTABLE_SECONDS = 0.5
"""A shorter wait is none."""
PROGRESS_BYTES = 1 << 20
"""This many bytes count as progress. A body with fewer in that time is slow."""
GAP_BYTES = 32 << 10
"""Ranges with a smaller gap between them are one request; it costs no more than a round trip."""
REQUEST_BYTES = 8 << 20
"""Longer spans are several requests."""
MakeTransport = Callable[[StorageSection], Transport]
Range = tuple[int, int]


class RemoteFetcher:
    """Shards of one kind of store. Picklable: a process that receives it makes its own client."""

    def __init__(self, make: MakeTransport, config: StorageSection) -> None:
        self._make = make
        self.config = config
        self._live: tuple[int, Transport] | None = None
        self._notice = SlowNotice()
        self._slots = threading.BoundedSemaphore(MAX_CONCURRENT_READS)

    def head(self, path: str) -> ShardStamp:
        """See Fetcher."""
        transport = self._transport()
        return self._tried(path, lambda: transport.head(path))

    def list_shards(self, prefix: str) -> list[ShardStamp]:
        """See Fetcher."""
        transport = self._transport()
        # A store's client may try a listing again by itself, without a word.
        place, text = place_of(self.config, prefix), "its shards are being listed"
        timer = threading.Timer(NOTICE_SECONDS, self._notice.say, (prefix, place, text))
        timer.daemon = True
        timer.start()
        try:
            return self._tried(prefix, lambda: transport.list_shards(prefix))
        finally:
            timer.cancel()

    def open(self, stamp: ShardStamp) -> BinaryIO:
        """See Fetcher."""
        raw = ChunkStream(self._resumed(stamp, 0, stamp.size))
        return cast(BinaryIO, io.BufferedReader(raw, READ_BUFFER_BYTES))

    def read(self, stamp: ShardStamp, offset: int, length: int) -> bytes:
        """See Fetcher."""
        return self.read_ranges(stamp, [(offset, length)])[0]

    def read_ranges(self, stamp: ShardStamp, ranges: Sequence[Range]) -> list[bytes]:
        """See Fetcher."""
        for offset, length in ranges:
            if offset < 0 or offset + length > stamp.size:
                raise integrity_error(
                    f"bytes {offset} to {offset + length} were asked for, it has {stamp.size}",
                    shard=stamp.path,
                    offset=offset,
                )
        spans = spans_of(ranges)
        pieces = [piece for span in spans for piece in _pieces(span)]
        found_pieces = at_once(
            lambda piece: self._read_piece(stamp, *piece), pieces, most=MAX_CONCURRENT_READS
        )
        bodies = dict(zip(pieces, found_pieces, strict=True))
        joined = {
            s: b"".join(chunk for piece in _pieces(s) for chunk in bodies.pop(piece)) for s in spans
        }
        parts = []
        for offset, length in ranges:
            span = spans[bisect_right(spans, offset, key=itemgetter(0)) - 1]
            at = offset - span[0]
            parts.append(joined[span][at : at + length])
        return parts

    def close(self) -> None:
        """Ends the client; the next read makes another."""
        if self._live is not None and self._live[0] == os.getpid():
            self._live[1].close()
        self._live = None

    def _read_piece(self, stamp: ShardStamp, start: int, stop: int) -> list[bytes]:
        with self._slots:
            return list(self._resumed(stamp, start, stop))

    def _resumed(self, stamp: ShardStamp, start: int, stop: int) -> Generator[bytes]:
        """The bytes of a range; what is missing of a body that broke off is asked for again."""
        transport = self._transport()
        tries = Tries(stamp.path, self.config, self._notice)
        reading = Reading(stamp.path)
        while start < stop:
            try:
                for chunk in reading.read_chunks(partial(transport.body, stamp, start, stop)):
                    start += len(chunk)
                    tries.progressed(len(chunk))
                    yield chunk
                if start < stop:
                    raise Transient(f"the body ended {stop - start} bytes too early")
            except StoreFault as fault:
                tries.note(fault)
        assert start == stop, "a transport sent more than was asked for"

    def _tried(self, path: str, request: Callable[[], T]) -> T:
        tries = Tries(path, self.config, self._notice)
        while True:
            try:
                with ACTIVITY.waiting(Reading(path).describe):
                    return request()
            except StoreFault as fault:
                tries.note(fault)

    def _transport(self) -> Transport:
        process = os.getpid()
        if self._live is None:
            self._live = (process, self._make(self.config))
        if self._live[0] != process:
            raise CapabilityError(
                f"this process ({process}) was forked from one ({self._live[0]}) that had already "
                "opened connections to a store. They do not survive a fork. Start workers by "
                "forkserver or spawn"
            )
        return self._live[1]

    def __reduce__(self) -> tuple[type[RemoteFetcher], tuple[MakeTransport, StorageSection]]:
        return RemoteFetcher, (self._make, self.config)


def spans_of(ranges: Sequence[Range]) -> list[Range]:
    """(start, stop) of joint reads: (offset, length) ranges in any order that overlap or nearly
    touch, joined."""
    joined: list[Range] = []
    for offset, length in sorted(ranges):
        if joined and offset <= joined[-1][1] + GAP_BYTES:
            joined[-1] = (joined[-1][0], max(joined[-1][1], offset + length))
        else:
            joined.append((offset, offset + length))
    return joined


def _pieces(span: Range) -> list[Range]:
    start, stop = span
    return [(at, min(at + REQUEST_BYTES, stop)) for at in range(start, stop, REQUEST_BYTES)]


class Reading:
    """One request for a shard, or for a folder that is listed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.num_bytes = 0
        self._since = self._started = time.monotonic()

    def read_chunks(self, ask: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
        """The chunks of a request. The watchdog sees the waits for the store, not the time of the
        consumer."""
        with ACTIVITY.waiting(self.describe):
            chunks = ask()
        reported = self.num_bytes
        while True:
            with ACTIVITY.waiting(self.describe):
                chunk = next(chunks, None)
            if chunk is None:
                return
            self.num_bytes += len(chunk)
            self._since = time.monotonic()
            # Another thread's reads say nothing of what the working one waits for.
            if self.num_bytes - reported >= PROGRESS_BYTES:
                reported = self.num_bytes
                ACTIVITY.worked()
            yield chunk

    def describe(self) -> str | None:
        """Whose answer is waited for, and what has come of it."""
        now = time.monotonic()
        if now - self._started < NOTABLE_SECONDS:
            return None
        came = (
            f"{self.num_bytes:,} bytes so far, the last of them {now - self._since:.0f} s ago"
            if self.num_bytes
            else "no byte of its answer so far"
        )
        return f"waiting for {redacted(self.path)} for {now - self._started:.0f} s: {came}"


def make_transport(config: StorageSection, *, named: str) -> Transport:
    """The transport that a line of `addresses.SCHEMES` names, `module:Class`."""
    module, _, name = named.partition(":")
    made: Transport = getattr(import_module(f"vlmpack.storage.{module}"), name)(config)
    return made


class RoutingFetcher:
    """Sends each shard to the fetcher of its scheme; picklable.

    Raises:
        RecipeError: an endpoint without TLS that is not allowed, or a secret that is written out.
    """

    def __init__(self, config: StorageSection | None = None) -> None:
        config = StorageSection() if config is None else config
        if problems := unsafe_storage(config):
            raise RecipeError([f"{key_name(one.path)}: {one.message}" for one in problems])
        self.local = LocalFetcher()
        kinds = {scheme.transport for scheme in SCHEMES.values()}
        made = {n: RemoteFetcher(partial(make_transport, named=n), config) for n in kinds}
        self.remotes = {name: made[scheme.transport] for name, scheme in SCHEMES.items()}

    def head(self, path: str) -> ShardStamp:
        """See Fetcher."""
        return self._of(path).head(path)

    def list_shards(self, prefix: str) -> list[ShardStamp]:
        """See Fetcher."""
        return self._of(prefix).list_shards(prefix)

    def open(self, stamp: ShardStamp) -> BinaryIO:
        """See Fetcher."""
        return self._of(stamp.path).open(stamp)

    def read(self, stamp: ShardStamp, offset: int, length: int) -> bytes:
        """See Fetcher."""
        return self._of(stamp.path).read(stamp, offset, length)

    def read_ranges(self, stamp: ShardStamp, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See Fetcher."""
        return self._of(stamp.path).read_ranges(stamp, ranges)

    def close(self) -> None:
        """Closes files and forgets clients; the next read opens again."""
        self.local.close()
        for remote in self.remotes.values():
            remote.close()

    def _of(self, path: str) -> LocalFetcher | RemoteFetcher:
        scheme = scheme_of(path)
        if scheme is None:
            return self.local
        if scheme not in self.remotes:
            raise transport_error(
                f"'{scheme}:' is not read; expected a path or one of {', '.join(self.remotes)}",
                shard=path,
            )
        return self.remotes[scheme]
