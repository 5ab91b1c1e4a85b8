"""What a transport does, its errors, and how often a request is tried again.

A transport raises one of three faults, without the shard's name or any text of the server, which
may hold secrets. `Tries` turns them into waits, and at last into a DataError.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from vlmpack.addresses import redacted
from vlmpack.errors import RefusedError, integrity_error, transport_error
from vlmpack.recipe.data import StorageSection
from vlmpack.storage.access import place_of
from vlmpack.storage.fetch import ShardStamp

logger = logging.getLogger("vlmpack")

FIRST_WAIT_SECONDS = 0.1
MAX_WAIT_SECONDS = 15.0
NOTICE_SECONDS = 5.0
"""Seconds of tries without success before a line says so."""
NOTICE_AGAIN_SECONDS = 300.0
PROGRESS_BYTES = 1 << 20
"""A body that continued this long after its first fault gets its tries back."""

_jitter = random.SystemRandom()  # never the run's own random numbers


class Transport(Protocol):
    """Single requests to one kind of store, from several threads; raises StoreFaults. Never
    pickled."""

    def head(self, path: str) -> ShardStamp:
        """The shard's size and version."""

    def body(self, stamp: ShardStamp, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from `start` to before `stop` of this version. They may end early; the caller
        counts."""

    def list_shards(self, prefix: str) -> list[ShardStamp]:
        """What lies below a prefix that ends with '/', at any depth."""

    def close(self) -> None:
        """End idle connections."""


class StoreFault(Exception):
    """A request that failed; the reason follows the shard's name in messages."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Transient(StoreFault):
    """Another try may succeed, after `wait_seconds` if the server asked for them."""

    def __init__(self, reason: str, wait_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds


class Refused(StoreFault):
    """Another try would fail as well."""


class Changed(StoreFault):
    """The shard is not the version that was asked for."""


class SlowNotice:
    """Says once that a store keeps a run waiting, and again when it does so much later."""

    def __init__(self) -> None:
        self._said = float("-inf")

    def say(self, shard: str, place: str, text: str) -> None:
        """One line."""
        now = time.monotonic()
        if now - self._said < NOTICE_AGAIN_SECONDS:
            return
        self._said = now
        at_place = f", asked at {place}," if place else ""
        logger.warning("%s%s keeps this process waiting: %s", redacted(shard), at_place, text)


@dataclass(eq=False)
class Tries:
    """The tries of one request, bounded by the time without progress.

    That time counts from the first fault since bytes came. So neither a download of hours nor a
    slow reader uses it up. `notice` is called when the tries take long.
    """

    shard: str
    config: StorageSection
    notice: SlowNotice | None = None
    failed: int = 0
    since_fault: int = 0
    _stuck_since: float | None = None

    def progressed(self, count: int) -> None:
        """So many bytes came."""
        if self.failed and count:
            self._stuck_since = None
            self.since_fault += count
            if self.since_fault >= PROGRESS_BYTES:
                self.failed = self.since_fault = 0

    def note(self, fault: StoreFault) -> None:
        """Waits before the next try.

        Raises:
            DataError: the fault is not one to try again, or the tries are spent.
        """
        if isinstance(fault, Changed):
            raise integrity_error(fault.reason, shard=self.shard) from None
        if not isinstance(fault, Transient):
            raise RefusedError(
                f"{fault.reason}{self._asked}", error_class="transport", shard=self.shard
            ) from None
        self.failed += 1
        now = time.monotonic()
        if self._stuck_since is None:
            self._stuck_since = now
        stuck = now - self._stuck_since
        longest = min(FIRST_WAIT_SECONDS * 2 ** (self.failed - 1), MAX_WAIT_SECONDS)
        wait = max(_jitter.uniform(longest / 2, longest), fault.wait_seconds)
        if self.failed >= self.config.max_tries or stuck + wait > self.config.retry_seconds:
            raise transport_error(
                f"{fault.reason}{self._asked}; {self._spent(stuck, fault)}", shard=self.shard
            ) from None
        if self.notice is not None and stuck + wait >= NOTICE_SECONDS:
            self.notice.say(
                self.shard,
                place_of(self.config, self.shard),
                f"{fault.reason}; try {self.failed + 1} of {self.config.max_tries} follows in "
                f"{wait:.1f} s, for up to {self.config.retry_seconds:g} s without progress "
                "(data.storage.max_tries, retry_seconds)",
            )
        time.sleep(wait)

    def _spent(self, stuck: float, fault: Transient) -> str:
        """Why there is no other try."""
        wait = ""
        if stuck + fault.wait_seconds > self.config.retry_seconds:
            wait = f"; it asked to wait {fault.wait_seconds:.0f} s"
        return (
            f"gave up after {self.failed} tries, {stuck:.1f} s without progress{wait} "
            f"(data.storage.max_tries {self.config.max_tries}, retry_seconds "
            f"{self.config.retry_seconds:g})"
        )

    @property
    def _asked(self) -> str:
        place = place_of(self.config, self.shard)
        return f" (asked {place})" if place else ""
