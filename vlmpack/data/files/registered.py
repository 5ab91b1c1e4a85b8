"""Data from a program: map-style sources, and functions from a record to another.

    class Photos:
        version = 2
        def __len__(self): ...
        def __getitem__(self, number): return {"messages": [...]}

    data.train: python:photos
    data.columns: python:to_messages

They travel with the fetcher to every reader, in the loader processes too. A source stands for a
file whose records it returns. A function stands for the layout of a file's records. An exception in
either is the fault of the record that was read.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

from PIL import Image

from vlmpack.addresses import registered_name
from vlmpack.data.files.form import FileForm, FormOptions
from vlmpack.data.files.record import Place, Record, RecordFile, drop_nulls
from vlmpack.errors import DataError, RecipeError, schema_error, transport_error
from vlmpack.handed_over import calling
from vlmpack.storage.fetch import Fetcher, ShardStamp
from vlmpack.words import kind_of, raised

Function = Callable[[Any], Any]
"""A record as its file has it -> a record of any layout, or its list of turns."""

REMEDY = "a source must return the same record each time; raise its `version` where it has changed"


class MapStyle(Protocol):
    """A source: records by their number, as torch's map-style data sets have them."""

    def __len__(self) -> int:
        """How many records there are."""

    def __getitem__(self, number: int) -> Any:
        """A record: a mapping in any layout that files may have."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The sources and functions that a program gives for the data, and their fingerprints by
    name."""

    sources: Mapping[str, MapStyle] = field(default_factory=dict)
    functions: Mapping[str, Function] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)


NOTHING = Registered()


class RegisteredFetcher:
    """A fetcher that reads a program's sources as well as files and stores; picklable."""

    def __init__(self, stores: Fetcher, registered: Registered) -> None:
        self.stores = stores
        self.registered = registered

    def head(self, path: str) -> ShardStamp:
        """See Fetcher. The size of a source is its number of records; the version is its
        fingerprint."""
        name = registered_name(path)
        if name is None:
            return self.stores.head(path)
        source = self.registered.sources.get(name)
        if source is None:
            raise transport_error("no source of this name", shard=path)
        return ShardStamp(path, num_records(source, path), self.registered.fingerprints[name])

    def open(self, stamp: ShardStamp) -> BinaryIO:
        """See Fetcher."""
        return self.stores.open(stamp)

    def read(self, stamp: ShardStamp, offset: int, length: int) -> bytes:
        """See Fetcher."""
        return self.stores.read(stamp, offset, length)

    def read_ranges(self, stamp: ShardStamp, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See Fetcher."""
        return self.stores.read_ranges(stamp, ranges)

    def list_shards(self, prefix: str) -> list[ShardStamp]:
        """See Fetcher."""
        return self.stores.list_shards(prefix)


def registered_of(fetcher: Fetcher) -> Registered:
    """The registered values that came with a fetcher."""
    return fetcher.registered if isinstance(fetcher, RegisteredFetcher) else NOTHING


def num_records(source: MapStyle, shown: str) -> int:
    """The length of a source.

    Raises:
        DataError: (schema) it raises, or returns none.
    """
    with calling(
        f"len() of {shown}",
        lambda error: schema_error(f"{shown}: len() of it {raised(error)}; expected its records"),
    ):
        return len(source)


class PythonRows(RecordFile):
    """The records of a program's source."""

    noun = "record"

    def __init__(self, stamp: ShardStamp, source: MapStyle) -> None:
        self.stamp = stamp
        self.source = source

    def scan(self) -> Generator[Record]:
        """See RecordFile."""
        for number in range(self.stamp.size):
            yield self._record(Place(number, number, 1))

    def read(self, places: Sequence[Place]) -> list[Record | DataError]:
        """See RecordFile."""
        return [self._record(place) for place in places]

    def _record(self, place: Place) -> Record:
        shown = f"{self.stamp.path}[{place.number}]"
        try:
            with calling(shown, lambda error: schema_error(f"{shown} {raised(error)}")):
                value = self.source[place.number]
            return Record(place, as_mapping(value, shown))
        except DataError as fault:
            return Record(place, None, fault)


def function_of(fetcher: Fetcher, text: str) -> Function | None:
    """The function that turns the records of a file into others, checked. None if there is none."""
    name = FileForm.from_text(text).function.partition("@")[0] if text else ""
    if not name:
        return None
    return checked(registered_of(fetcher).functions[name], f"python:{name}")


def asked_function(options: FormOptions, fetcher: Fetcher) -> tuple[str, Function | None]:
    """The program's function that `columns` names, as a form has it; empty and None for no
    function.

    Raises:
        RecipeError: the program handed over nothing of that name.
    """
    columns = options.columns
    name = registered_name(columns) if isinstance(columns, str) else None
    if name is None:
        return "", None
    registered = registered_of(fetcher)
    if name not in registered.functions:
        raise RecipeError(f"{options.knob}: {columns}: no function of this name was handed over")
    function = checked(registered.functions[name], f"python:{name}")
    return f"{name}@{registered.fingerprints[name]}", function


def checked(function: Function, shown: str) -> Function:
    """A function whose faults are those of the record."""

    def call(value: Any) -> Mapping[str, Any]:
        with calling(shown, lambda error: schema_error(f"{shown} {raised(error)}")):
            made = function(value)
        if isinstance(made, list | tuple):
            made = {"messages": made}
        return as_mapping(made, shown)

    return call


def rewritten(record: Record, function: Function | None) -> Record:
    """A record as the program's function makes it; its fault where that fails."""
    if function is None or record.value is None:
        return record
    try:
        return Record(record.place, function(dict(record.value)), None, record.unused, record.line)
    except DataError as fault:
        return Record(record.place, None, fault, record.unused, record.line)


def as_mapping(value: Any, shown: str) -> Mapping[str, Any]:
    """A record as files have them: images of Pillow as PNG files, tuples as lists.

    Raises:
        DataError: (schema) it is none.
    """
    if not isinstance(value, Mapping):
        raise schema_error(
            f"{shown} returned {kind_of(value)}; expected a record, {{'messages': [...]}} say"
        )
    plain: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise schema_error(f"{shown} returned a record with the key {key!r}; expected a text")
        plain[key] = _plain(item)
    drop_nulls(plain)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Image.Image):
        file = io.BytesIO()
        value.save(file, "PNG")
        return file.getvalue()
    return value
