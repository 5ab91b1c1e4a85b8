"""Row groups or batches of a table that were decoded, kept up to so many bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

KEPT_BYTES = 256 << 20
"""What one process keeps of one file."""


@dataclass(slots=True)
class KeptRows:
    """What was used longest ago goes first; the newest stays, whatever its size.

    Args:
        most: bytes.
    """

    most: int = KEPT_BYTES
    _tables: OrderedDict[int, Any] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def get(self, number: int, make: Callable[[int], Any]) -> Any:
        """A row group, decoded where it is not kept.

        Args:
            number: of the row group or batch.
            make: decodes it.
        """
        table = self._tables.get(number)
        if table is not None:
            self._tables.move_to_end(number)
            return table
        table = make(number)
        self._bytes += table.nbytes
        while self._tables and self._bytes > self.most:
            self._bytes -= self._tables.popitem(last=False)[1].nbytes
        self._tables[number] = table
        return table

    def clear(self) -> None:
        """Let go of all."""
        self._tables.clear()
        self._bytes = 0
