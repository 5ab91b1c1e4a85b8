"""A file of a store or a disk as an object that reads and seeks, for libraries that want one."""

from __future__ import annotations

import io

from vlmpack.errors import DataError
from vlmpack.storage.fetch import Fetcher, ShardStamp


class FetchedFile(io.RawIOBase):
    """Reads by range. A fault of the store is kept in `fault`, since libraries word it anew.

    Args:
        fetcher: reads.
        stamp: the file.
    """

    def __init__(self, fetcher: Fetcher, stamp: ShardStamp) -> None:
        self.fetcher = fetcher
        self.stamp = stamp
        self.fault: DataError | None = None
        self._at = 0

    def readable(self) -> bool:
        """See io.RawIOBase: always."""
        return True

    def seekable(self) -> bool:
        """See io.RawIOBase: always."""
        return True

    def tell(self) -> int:
        """See io.RawIOBase."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See io.RawIOBase."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.stamp.size}[whence]
        self._at = start + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """See io.RawIOBase."""
        left = max(0, self.stamp.size - self._at)
        count = left if size is None or size < 0 else min(size, left)
        if not count:
            return b""
        try:
            data = self.fetcher.read(self.stamp, self._at, count)
        except DataError as error:
            self.fault = error
            raise OSError(error.reason) from error
        self._at += count
        return data
