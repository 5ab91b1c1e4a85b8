"""Shards that are brought to the cache while others are read, by one thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from vlmpack.data.fetch import ShardStamp
from vlmpack.errors import VlmpackError

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

    def wait(self) -> None:
        """Until nothing is left to do."""
        while (thread := self._thread) is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._todo:
                    self._thread = None
                    return
                stamp = self._todo.popleft()
            try:
                self._fetch(stamp)
            except VlmpackError as error:  # whoever reads the shard meets it again, and says so
                logger.debug("%s was not fetched ahead: %s", stamp.path, error)
            except RuntimeError:
                if threading.main_thread().is_alive():
                    raise
                return  # the process ends, and no thread can be started any more
