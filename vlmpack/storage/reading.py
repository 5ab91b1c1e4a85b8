"""A request to a store that is being waited for, in the words of the watchdog."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from vlmpack.activity import ACTIVITY
from vlmpack.addresses import redacted

NOTABLE_SECONDS = 0.5
"""A shorter wait is none."""
PROGRESS_BYTES = 1 << 20
"""As many bytes are progress; a body that brings fewer in all that time is slow."""


class Reading:
    """One request.

    Args:
        path: of the shard, or of the folder that is listed.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.num_bytes = 0
        self._since = self._begun = time.monotonic()

    def told(self, ask: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
        """What comes of a request; the watchdog knows of those moments in which the store is waited
        for, not of those in which whoever takes the chunks takes his time.

        Args:
            ask: begins the request.
        """
        with ACTIVITY.waiting(self.describe):
            chunks = ask()
        told = self.num_bytes
        while True:
            with ACTIVITY.waiting(self.describe):
                chunk = next(chunks, None)
            if chunk is None:
                return
            self.num_bytes += len(chunk)
            self._since = time.monotonic()
            # Another thread's reads say nothing of what the working one waits for.
            if self.num_bytes - told >= PROGRESS_BYTES:
                told = self.num_bytes
                ACTIVITY.worked()
            yield chunk

    def describe(self) -> str | None:
        """Whose answer is waited for, and what has come of it."""
        now = time.monotonic()
        if now - self._begun < NOTABLE_SECONDS:
            return None
        came = (
            f"{self.num_bytes:,} bytes so far, the last of them {now - self._since:.0f} s ago"
            if self.num_bytes
            else "no byte of its answer so far"
        )
        return f"waiting for {redacted(self.path)} for {now - self._begun:.0f} s: {came}"
