"""One part's file: a parquet table, then a digest over it and over the file's name.

    <parquet bytes> <BLAKE2b-128 of name and bytes>

Parquet's own checksums leave its footer out, and one flipped bit there drops rows. So nothing of a
part is looked at before the digest behind it is found to be right, over the bytes that were read
once and are then parsed from memory. The name is part of it: it says which shard and which rule the
part was made from, so a part under another name is no part.
"""

from __future__ import annotations

import hashlib
import io
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlmpack.errors import DataError, refuse_full_table
from vlmpack.file_format import FORMAT, INDEX
from vlmpack.whole_file import sync_folder, write_atomically

logger = logging.getLogger("vlmpack")

SUFFIX = ".part"
"""No parquet reader takes such a file as it is, so it is not called one."""
SEAL_BYTES = 16
_FORMAT = FORMAT.encode()


def write_part(path: str, table: Any, metadata: dict[bytes, bytes]) -> None:
    """Writes a part atomically: temporary file, fsync, rename, fsync of the folder.

    Raises:
        DataError: class `transport`, where the folder cannot be written.
    """
    content = io.BytesIO()
    facts = {_FORMAT: str(INDEX.number).encode(), **metadata}
    pq.write_table(table.replace_schema_metadata(facts), content, compression="zstd")
    data = content.getvalue()
    try:
        write_atomically(Path(path), data + _seal(path, data))
        sync_folder(Path(path).parent)
    except OSError as error:
        raise unwritable(path, error) from error


def read_part(path: str) -> Any | None:
    """The part as a pyarrow table; None where it is missing or damaged, so that it is remade."""
    try:
        with open(path, "rb") as stream:  # noqa: PTH123 - every shard of a launch comes by here
            content = stream.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        refuse_full_table(error)
        logger.warning("the index file %s cannot be read (%s); it is made again", path, error)
        return None
    data = memoryview(content)[:-SEAL_BYTES]
    if content[-SEAL_BYTES:] == _seal(path, data):
        try:
            table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
        except (OSError, pa.ArrowException):
            pass  # sealed by a pyarrow that wrote what this one does not read
        else:
            return table if _has_the_format(table, path) else None
    logger.warning(
        "the index file %s is damaged: its %d bytes are not those that were written; it is made "
        "again",
        path,
        len(content),
    )
    return None


def _has_the_format(table: Any, path: str) -> bool:
    """Whether this version reads a part; a line says where it does not, since it is made again."""
    number = (table.schema.metadata or {}).get(_FORMAT)
    refusal = INDEX.refusal(None if number is None else int(number), f"the index file {path}")
    if refusal is not None:
        logger.warning("%s; it is made again now", refusal)
    return refusal is None


def unwritable(path: str, error: OSError) -> DataError:
    """Why a part cannot be kept."""
    return DataError(
        f"the index cannot be written to {path}: {error.strerror or error}; set data.index_dir "
        "(or VLMPACK_CACHE) to a folder that can be written",
        error_class="transport",
    )


def _seal(path: str, data: bytes | memoryview) -> bytes:
    """Ties a part's bytes to its name."""
    name = path.rpartition("/")[2].encode(errors="surrogateescape")
    digest = hashlib.blake2b(name, digest_size=SEAL_BYTES, person=b"vlmpack.part")
    digest.update(data)
    return digest.digest()
