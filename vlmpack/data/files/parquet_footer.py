"""Where the column chunks of a Parquet file lie, read from its footer.

pyarrow has these figures too. But its `RowGroupMetaData.column` ends the process where a damaged
footer contradicts itself: the C++ code throws, and nobody there catches it. What pyarrow reads with
later is guarded. The footer is a struct of Thrift's compact protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MOST_DEPTH = 32
_MAGIC = b"PAR1"
_TAIL_BYTES = 8
_END_BYTES = 1 << 16
"""Read at once: a store takes as long for a footer's length alone."""
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS = (4, 5, 6)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A column of a row group."""

    column: str
    start: int
    compressed: int
    uncompressed: int


def read_chunks(file: Any, size: int) -> list[list[Chunk]]:
    """The column chunks of each row group.

    Raises:
        ValueError: the footer is damaged.
        OSError: as the file does.
    """
    file.seek(max(0, size - _END_BYTES))
    end = file.read(_END_BYTES)
    length = int.from_bytes(end[-_TAIL_BYTES:-4], "little")
    if end[-4:] != _MAGIC or length > size - _TAIL_BYTES:
        raise ValueError("it ends without the mark of a Parquet file")
    if length + _TAIL_BYTES > len(end):
        file.seek(size - _TAIL_BYTES - length)
        end = file.read(length + _TAIL_BYTES)
    try:
        groups = _Compact(end[-_TAIL_BYTES - length : -_TAIL_BYTES]).struct(0).get(4, [])
        return [[_chunk(chunk[3]) for chunk in group[1]] for group in groups]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"its list of row groups is damaged: {error!r}") from error


def _chunk(facts: dict[int, Any]) -> Chunk:
    numbers = (facts.get(11) or facts[9], facts[7], facts[6])
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError(f"offset and sizes of a column are {numbers}; expected three counts")
    return Chunk(facts[3][0].decode(), *numbers)


class _Compact:
    """Values of Thrift's compact protocol: a struct is a dict by the numbers of its fields."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def struct(self, depth: int) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            kind = head & 15
            fields[number] = kind == _TRUE if kind <= _FALSE else self._value(kind, depth + 1)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > MOST_DEPTH:
            raise ValueError("it is nested too deeply")
        if kind in _INTEGERS:
            return self._integer()
        if kind == _BINARY:
            return self._taken(self._varint())
        if kind in (_LIST, _SET):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            return [self._value(head & 15, depth + 1) for _ in range(count)]
        if kind == _STRUCT:
            return self.struct(depth)
        if kind == _MAP:
            count = self._varint()
            kinds = self._byte() if count else 0
            pairs = (kinds >> 4, kinds & 15)
            return [[self._value(each, depth + 1) for each in pairs] for _ in range(count)]
        if kind in (_TRUE, _FALSE, _BYTE):
            return self._byte()
        if kind == _DOUBLE:
            return self._taken(8)
        raise ValueError(f"a value is of kind {kind}, which Thrift does not have")

    def _byte(self) -> int:
        return self._taken(1)[0]

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number is longer than 64 bits")

    def _taken(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise ValueError("it ends in the middle of a value")
        taken = self.data[self.at : end]
        self.at = end
        return taken
