"""A record of a file that is no shard, and what every reader of such files offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vlmpack.data.shards.naming import refuse_many_keys
from vlmpack.errors import DataError, schema_error
from vlmpack.words import kind_of


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies in its file.

    Args:
        number: of the record, counted from 0.
        offset: first byte of its unit: the record itself in a text file, else the row group or
            batch that it is a row of.
        length: bytes of that unit.
        row: of the record in its unit.
    """

    number: int
    offset: int
    length: int
    row: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """One record.

    Args:
        line: of a text file, counted from 1, where it was scanned; 0 where a record is no line.
    """

    place: Place
    value: Mapping[str, Any] | None
    fault: DataError | None = None
    unused: tuple[str, ...] = ()
    line: int = 0


class RecordFile(ABC):
    """The records of one file; kept open between two reads."""

    __slots__ = ()

    noun: ClassVar[str]
    """What a record is called in a message: a line, an item, a row."""

    @abstractmethod
    def scan(self) -> Generator[Record]:
        """All records, in order. One that is bad by itself has a fault.

        Raises:
            DataError: class `integrity` where the file is damaged, so that nobody can say how many
                records are lost, `schema` where it is no such file, `transport`.
        """

    @abstractmethod
    def read(self, places: Sequence[Place]) -> list[Record | DataError]:
        """The records at some places, in that order; what cannot be read is an error there."""

    def close(self) -> None:  # noqa: B027 - most keep nothing
        """Close files and drop kept units. The next read opens them again."""


def as_record(place: Place, value: object, unused: tuple[str, ...] = ()) -> Record:
    """A record of what was parsed, with a fault where it is no object."""
    if isinstance(value, dict):
        try:
            refuse_many_keys(value)
        except DataError as fault:
            return Record(place, None, fault, unused)
        drop_nulls(value)
        return Record(place, value, unused=unused)
    return Record(place, None, schema_error(f"is {kind_of(value)}; expected an object"))


def drop_nulls(record: dict[str, Any]) -> None:
    """Drop null keys from a record and its objects. A table's structs have all keys, so null means
    missing."""
    pending: list[Any] = [record]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            for key in [key for key, value in item.items() if value is None]:
                del item[key]
            pending += item.values()
        elif isinstance(item, list):
            pending += item
