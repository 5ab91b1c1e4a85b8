"""Shards that are brought to the cache while others are read, by one thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from vlmpack.errors import VlmpackError
from vlmpack.storage.fetch import ShardStamp

logger = logging.getLogger("vlmpack")


class BackgroundFetch:
    """Calls `fetch` for shard after shard, in a thread that ends when there is nothing to do.

    Args:
        fetch: brings one shard to the cache.
    """

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
