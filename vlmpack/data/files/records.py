"""Records of a JSONL file, a LLaVA json file, or a folder of parquet files, one at a time.

A record is the object as its file has it, with the place to name when it is bad. A line that is no
JSON is a record too, with a fault: whether it ends the conversion is the caller's choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlmpack.data.columns.form import RecordForm, read_columns
from vlmpack.data.columns.layout import fitting
from vlmpack.data.shards.json_text import parse_json
from vlmpack.errors import DataError, VlmpackError, schema_error
from vlmpack.words import kind_of

FORMATS = ("auto", "jsonl", "llava", "hf")
"""What `--format` takes; `auto` goes by a folder, and by the name's end."""

_FORM_OF_SUFFIX = {
    "hf": "hf",
    "parquet": "hf",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "json": "llava",
}

BATCH_ROWS = 32

_SHARD_NUMBER = re.compile(r"[-_]?\d+(-of-\d+)?$")


@dataclass(frozen=True, slots=True)
class Record:
    """One record.

    Args:
        place: file and line, item or row, for messages.
        value: the object; None where it cannot be read.
        fault: why it cannot be read.
        unread: columns of a table that were not looked at.
    """

    place: str
    value: dict[str, Any] | None
    fault: str | None = None
    unread: tuple[str, ...] = ()


def open_records(
    path: Path, form: str = "auto", split: str | None = None, *, every_column: bool = False
) -> Iterator[Record]:
    """The records of a file or folder, in its own order.

    Args:
        path: what to read.
        form: one of FORMATS.
        split: the split of a parquet folder; None where it has one only.
        every_column: whether all columns of a table are read, whatever layout they look like.

    Raises:
        VlmpackError: there is nothing of that format.
    """
    if form not in FORMATS:
        raise VlmpackError(f"--format {form}: expected one of {', '.join(FORMATS)}")
    if not path.exists():
        raise VlmpackError(f"{path}: there is no such file or folder")
    if form == "auto":
        suffix = "hf" if path.is_dir() else path.suffix.lower().lstrip(".")
        form = _FORM_OF_SUFFIX.get(suffix, "")
        if not form:
            raise VlmpackError(
                f"{path}: the name does not say what it is; expected .jsonl, .json, .parquet or a "
                "folder, or --format"
            )
    if split is not None and form != "hf":
        raise VlmpackError(f"--split {split}: only a folder of parquet files has splits")
    if form == "jsonl":
        return _json_lines(path)
    if form == "llava":
        return _json_items(path)
    return _parquet_rows(_parquet_files(path, split), every_column)


def _json_lines(path: Path) -> Iterator[Record]:
    if path.is_dir():
        raise VlmpackError(f"{path}: is a folder; expected one .jsonl file")
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield _from_json(f"{path}, line {number}", line)


def _json_items(path: Path) -> Iterator[Record]:
    try:
        items = parse_json(path.read_bytes().decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise schema_error(f"cannot be read as JSON: {error}", shard=str(path)) from error
    if not isinstance(items, list):
        raise schema_error(f"holds {kind_of(items)}; expected a list of records", shard=str(path))
    for number, item in enumerate(items):
        yield _checked(f"{path}, item {number}", item)


def _from_json(place: str, line: bytes) -> Record:
    try:
        return _checked(place, parse_json(line.decode("utf-8-sig")))
    except (ValueError, RecursionError) as error:
        return Record(place, None, f"is no JSON: {error}")


def _checked(place: str, value: object) -> Record:
    if not isinstance(value, dict):
        return Record(place, None, f"is {kind_of(value)}; expected an object")
    return Record(place, value)


def _parquet_files(path: Path, split: str | None) -> list[Path]:
    """The parquet files of one split, by name."""
    if path.is_file():
        return [path]
    files = sorted(path.rglob("*.parquet"))
    if not files:
        raise VlmpackError(
            f"{path}: holds no .parquet file; other forms of a data set (arrow files of "
            "save_to_disk, scripts) can be saved as parquet first"
        )
    splits = {file: _split_name(file.relative_to(path)) for file in files}
    names = sorted(set(splits.values()))
    if split is None and len(names) > 1:
        raise VlmpackError(f"{path}: holds the splits {', '.join(names)}; choose one by --split")
    chosen = [file for file in files if split is None or splits[file] == split]
    if not chosen:
        raise VlmpackError(f"{path}: no split {split!r}; it holds {', '.join(names)}")
    return chosen


def _split_name(path: Path) -> str:
    """`data/train-00000-of-00002.parquet` and `train/0000.parquet` are both of `train`; a
    configuration's folder in between is part of the name."""
    folders = [part for part in path.parts[:-1] if part != "data"]
    stem = _SHARD_NUMBER.sub("", path.stem)
    return "/".join([*folders, stem] if stem else folders) or "train"


def _parquet_rows(files: Sequence[Path], every_column: bool) -> Iterator[Record]:
    for file in files:
        try:
            with pq.ParquetFile(file) as table:
                names = table.schema_arrow.names
                columns = names if every_column else _columns(names)
                unread = tuple(name for name in names if name not in columns)
                row = 0
                for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                    for value in batch.to_pylist():
                        record = _checked(f"{file}, row {row}", _without_nulls(value))
                        yield replace(record, unread=unread)
                        row += 1
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"cannot be read as parquet: {error}", error_class="integrity", shard=str(file)
            ) from error


def _columns(names: Sequence[str]) -> list[str]:
    """The columns that a layout reads which the table may have; all, where it has none."""
    fits = fitting(names)
    read = {name for each in fits for name in read_columns(RecordForm(each.name), names)}
    return [name for name in names if name in read or not fits]


def _without_nulls(value: Any) -> Any:
    """Parquet's structs have every key of every row; those that are null were not there."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
