"""Many parts in one file: a warm launch opens one file, not one for each shard.

    parts of all shards, in order -> one part file: their rows one after the other, and of each part
    its name, its number of rows and its metadata

It is named after the names of its parts, and these say which shards, in which version, and which
rule they were made from; so a shard that changed, came or went asks for another file, and nothing
is ever outdated in one. Like a part it ends in a digest over all of it and its name, verified
before anything is looked at; where it is missing or damaged, the parts are read and it is written
again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from vlmpack.data.index.part_file import read_part, write_part
from vlmpack.data.index.parts import BuildPart, BuildSettings, Part, build_parts, load_part
from vlmpack.errors import DataError

logger = logging.getLogger("vlmpack")

LEAST_GATHERED = 16
"""Fewer parts are read one by one."""
MOST_KEPT = 8
"""Files of one kind in a folder; those used longest ago are removed, for they are copies."""

_PARTS = b"vlmpack.parts"

Fits = Callable[[int, Any], bool]
"""Whether the table of the part at a place is what is wanted."""


def open_parts(
    parts: Sequence[Part], build: BuildPart, settings: BuildSettings, fits: Fits, *, what: str
) -> list[Any]:
    """The tables of all parts, each made where it is missing or damaged.

    Args:
        what: the parts' kind.

    Raises:
        VlmpackError: what `build` raised for the first shard in order that failed; or others make
            the parts and make no progress.
        DataError: class `integrity`, where a new part does not read back.
    """
    if len(parts) >= LEAST_GATHERED:
        path = _path(parts, what)
        tables = _read(path, parts, fits)
        if tables is not None:
            return tables
    build_parts(parts, build, settings, what=what)
    tables = [load_part(part, build, partial(fits, place)) for place, part in enumerate(parts)]
    if len(parts) >= LEAST_GATHERED:
        _write(path, parts, tables)
    return tables


def _path(parts: Sequence[Part], what: str) -> Path:
    paths = [Path(part.path) for part in parts]
    names = "\n".join(path.name for path in paths)
    digest = hashlib.blake2b(names.encode(errors="surrogateescape"), digest_size=16).hexdigest()
    return paths[0].parent / f"{digest}.{what}.gathered"


def _read(path: Path, parts: Sequence[Part], fits: Fits) -> list[Any] | None:
    """The tables of the parts; None where the file is missing, damaged, or of other parts."""
    whole = read_part(str(path))
    if whole is None:
        return None
    facts = json.loads((whole.schema.metadata or {}).get(_PARTS, b"[]"))
    names = [part.path.rpartition("/")[2] for part in parts]
    if [name for name, _, _ in facts] != names:
        return None
    with suppress(OSError):
        os.utime(path)  # used: others are older
    whole = whole.combine_chunks()
    tables, start = [], 0
    for place, (_, rows, metadata) in enumerate(facts):
        table = whole.slice(start, rows).replace_schema_metadata(metadata)
        if not fits(place, table):
            return None
        tables.append(table)
        start += rows
    return tables if start == whole.num_rows else None


def _write(path: Path, parts: Sequence[Part], tables: Sequence[Any]) -> None:
    """Writes the file; that it cannot be is no fault, since all of it lies in the parts."""
    facts = [
        [
            part.path.rpartition("/")[2],
            table.num_rows,
            _in_text(table.schema.metadata or {}),
        ]
        for part, table in zip(parts, tables, strict=True)
    ]
    rows = pa.concat_tables([table.replace_schema_metadata(None) for table in tables])
    try:
        write_part(str(path), rows, {_PARTS: json.dumps(facts).encode()})
        kind = path.name.partition(".")[2]
        found = sorted(
            path.parent.glob(f"{'[0-9a-f]' * 32}.{kind}"), key=lambda file: file.stat().st_mtime_ns
        )
        for file in found[:-MOST_KEPT]:
            file.unlink(missing_ok=True)
    except (DataError, OSError) as error:
        logger.info("%-14s the next launch will read each index file again: %s", "index", error)


def _in_text(metadata: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in metadata.items()}
