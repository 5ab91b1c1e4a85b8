"""The samples of a split, saved with packs that need the original shards no more."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlmpack.data.index.groups import SamplePrefixes
from vlmpack.data.index.lengths import CHOSEN, COUNTS
from vlmpack.data.index.overlong import Dropped, Fitted
from vlmpack.data.index.table import SampleTable, int64s
from vlmpack.errors import PacksError
from vlmpack.storage.fetch import ShardStamp

SAMPLES = "samples.parquet"
_NUMBERS = ("offsets", "lengths", "crc32s", *COUNTS)
_PREFIXES = ("prefix_lengths", "prefix_digests")
_FACTS = b"vlmpack.split"


def save_samples(fitted: Fitted) -> bytes:
    """The file's content: a row a sample, in index order."""
    table, count = fitted.table, fitted.table.num_samples
    dropped = {item.number: item.reason for item in fitted.dropped}
    faults = [table.faults.get(number, (None, None)) for number in range(count)]
    columns: dict[str, Any] = {
        "key": pa.array(table.keys.to_pylist(), pa.string()),
        **{name: getattr(table, name) for name in _NUMBERS},
        **({} if table.num_chosen_tokens is None else {CHOSEN: table.num_chosen_tokens}),
        **_prefix_columns(table.prefixes),
        "eligible": fitted.eligible,
        "error_class": pa.array([name for name, _ in faults], pa.string()),
        "reason": pa.array([reason for _, reason in faults], pa.string()),
        "dropped": pa.array([dropped.get(number) for number in range(count)], pa.string()),
        "sizes": pa.array(
            [table.shrunk.get(number) for number in range(count)], pa.list_(pa.list_(pa.int32()))
        ),
    }
    facts = {
        "shards": [[stamp.path, stamp.size, stamp.version, stamp.pin] for stamp in table.shards],
        "shard_starts": table.shard_starts.tolist(),
        "source_starts": table.source_starts.tolist(),
    }
    found = pa.table(columns).replace_schema_metadata({_FACTS: json.dumps(facts).encode()})
    sink = io.BytesIO()
    pq.write_table(found, sink, compression="zstd")
    return sink.getvalue()


def load_samples(path: Path, data: bytes) -> Fitted:
    """What `save_samples` wrote.

    Raises:
        PacksError: not such a file.
    """
    try:
        found = pq.ParquetFile(pa.BufferReader(data)).read()
        return _fitted(found, json.loads(found.schema.metadata[_FACTS]))
    except (OSError, pa.ArrowException, KeyError, ValueError, TypeError) as error:
        raise PacksError(f"packing.path: {path} cannot be read: {error!r}") from error


def _fitted(found: Any, facts: dict[str, Any]) -> Fitted:
    classes, reasons = found.column("error_class").to_pylist(), found.column("reason").to_pylist()
    faults = {
        number: (name, reason)
        for number, (name, reason) in enumerate(zip(classes, reasons, strict=True))
        if name is not None
    }
    bad = np.zeros(found.num_rows, dtype=np.bool_)
    bad[list(faults)] = True
    sizes = enumerate(found.column("sizes").to_pylist())
    columns: dict[str, Any] = {name: int64s(found, name) for name in _NUMBERS}
    table = SampleTable(
        shards=tuple(ShardStamp(*shard) for shard in facts["shards"]),
        shard_starts=np.asarray(facts["shard_starts"], dtype=np.int64),
        source_starts=np.asarray(facts["source_starts"], dtype=np.int64),
        **columns,
        num_chosen_tokens=int64s(found, CHOSEN) if CHOSEN in found.column_names else None,
        prefixes=_prefixes(found),
        bad=bad,
        keys=found.column("key"),
        faults=faults,
        shrunk={n: tuple((w, h) for w, h in each) for n, each in sizes if each is not None},
        unknown_keys={},  # named when the packs were made
    )
    dropped = enumerate(found.column("dropped").to_pylist())
    return Fitted(
        table,
        np.asarray(found.column("eligible").to_numpy(zero_copy_only=False), dtype=np.bool_),
        tuple(Dropped(number, reason) for number, reason in dropped if reason is not None),
    )


def _prefix_columns(prefixes: SamplePrefixes | None) -> dict[str, Any]:
    """Prefixes of the samples, as many places each; nothing where nobody asks."""
    if prefixes is None:
        return {}
    kind = pa.list_(pa.int64(), prefixes.lengths.shape[1])
    columns = (prefixes.lengths.tolist(), prefixes.digests.tolist())
    return {name: pa.array(column, kind) for name, column in zip(_PREFIXES, columns, strict=True)}


def _prefixes(found: Any) -> SamplePrefixes | None:
    if _PREFIXES[0] not in found.column_names:
        return None
    most = found.schema.field(_PREFIXES[0]).type.list_size
    columns = (found.column(name).to_pylist() for name in _PREFIXES)
    return SamplePrefixes(*(np.asarray(each, np.int64).reshape(-1, most) for each in columns))
