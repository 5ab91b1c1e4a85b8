"""Rows of a table's batch as records: checked before anything is taken out of it.

pyarrow takes offsets and lengths as a stream has them, so that a damaged one would be read beyond
the batch's memory and end the process. A text that is no UTF-8 is a fault of its row alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from vlmpack import errors
from vlmpack.data.files.record import Place, Record, as_record
from vlmpack.errors import schema_error

BATCH_ROWS = 32
"""Rows that are made values of at a time."""
UNREADABLE = (pa.ArrowException, *errors.UNREADABLE)
"""What pyarrow raises over a damaged file, or a name of a column that is no UTF-8."""
_NO_VALUE = (ValueError, OverflowError)
"""What pyarrow raises of a text that is no UTF-8, or a time that Python does not have."""


def check_batch(batch: Any) -> None:
    """Raise pa.ArrowInvalid where a batch refers to what it does not hold."""
    for column in batch.columns:
        bare = _without_texts(column.type)
        (column if bare == column.type else column.view(bare)).validate(full=True)


def row_values(batch: Any) -> Iterator[Any]:
    """The values of a batch's rows; the error of one that cannot be made, in its place.

    Args:
        batch: a record batch that was checked, or a table.
    """
    for begin in range(0, batch.num_rows, BATCH_ROWS):
        yield from _values(batch.slice(begin, BATCH_ROWS))


def row_record(place: Place, value: Any, unread: tuple[str, ...]) -> Record:
    """A record of a row's value, with a fault where it is an error.

    Args:
        unread: columns that were not looked at.
    """
    if isinstance(value, _NO_VALUE):
        return Record(place, None, schema_error(f"cannot be read: {value}"), unread)
    return as_record(place, value, unread)


def _values(part: Any) -> list[Any]:
    try:
        return list(part.to_pylist())
    except _NO_VALUE as error:
        if part.num_rows == 1:
            return [error]
    return [value for row in range(part.num_rows) for value in _values(part.slice(row, 1))]


def _without_texts(kind: Any) -> Any:
    """A type with bytes where it has texts, which lie in memory alike."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        item = kind.value_field.with_type(_without_texts(kind.value_type))
        return pa.list_(item) if pa.types.is_list(kind) else pa.large_list(item)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_texts(field.type)) for field in kind])
    return kind
