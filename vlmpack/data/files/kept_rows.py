"""Row groups or batches of a table that were decoded, kept up to so many bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

KEPT_BYTES = 256 << 20
"""What one process keeps, of all its files together."""


@dataclass(slots=True)
class KeptRows:
    """What was used longest ago goes first; the newest stays, whatever its size.

    Args:
        most: bytes.
    """

    most: int = KEPT_BYTES
    _tables: OrderedDict[tuple[str, Hashable], Any] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def get(self, path: str, place: Hashable, make: Callable[[], Any]) -> Any:
        """A row group, decoded where it is not kept.

        Args:
            path: of its file.
            place: of the row group or batch in it.
            make: decodes it.
        """
        key = (path, place)
        table = self._tables.get(key)
        if table is not None:
            self._tables.move_to_end(key)
            return table
        table = make()
        self._bytes += table.nbytes
        while self._tables and self._bytes > self.most:
            self._bytes -= self._tables.popitem(last=False)[1].nbytes
        self._tables[key] = table
        return table

    def drop(self, path: str) -> None:
        """Let go of what is of one file."""
        for key in [key for key in self._tables if key[0] == path]:
            self._bytes -= self._tables.pop(key).nbytes
