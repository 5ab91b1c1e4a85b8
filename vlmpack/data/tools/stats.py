"""What a source holds, before there is a recipe: `vlmpack data stats`.

Files are indexed and measured by the readers of a run. So what is refused here is what a run would
refuse, in the same words. Keys are counted in a second pass over texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmpack.activity import ACTIVITY
from vlmpack.data.files.records import open_file
from vlmpack.data.files.shard_samples import shard_records
from vlmpack.data.files.tables import take_all
from vlmpack.data.index.held_out import NEVER, OPENING, held_out
from vlmpack.data.index.lengths import COUNTS, ShardBuilder, measured, read_documents, text_of
from vlmpack.data.index.parts import part_for
from vlmpack.data.index.shard_index import IndexBuilder, ShardIndex, load_index
from vlmpack.data.shards.naming import MAX_KEYS, parse_json
from vlmpack.encode.coordinates import Doubts, note_doubt
from vlmpack.encode.decode import oriented_size
from vlmpack.encode.sample import other_form
from vlmpack.errors import or_raise
from vlmpack.recipe.sources import Share
from vlmpack.storage.fetch import ShardStamp
from vlmpack.words import shape_of

Int64s = npt.NDArray[np.int64]

PERCENTILES = (0, 5, 50, 95, 99, 100)
MAX_SAID = 5
"""The most reasons of one class that are shown."""


@dataclass(slots=True)
class Refused:
    """Samples of one class of fault. A reason has (samples, one of them as "file, key"), and the
    numbers of its first sample."""

    count: int = 0
    reasons: dict[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(slots=True)
class SourceStats:
    """The figures of one source.

    Args:
        images: how many a sample has -> samples.
        sizes: (n, 2) width and height of each image, as it is seen.
        lengths: name of COUNTS -> (m,) of the samples that are not refused; empty without a model.
        unknown_keys: keys of records that are not read -> records.
        doubts: samples whose coordinates may be wrong, with a model.
        openings: an array for each file, which says of each sample what its record asks.
    """

    samples: int = 0
    keys: Counter[str] = field(default_factory=Counter)
    unknown_keys: Counter[str] = field(default_factory=Counter)
    images: Counter[int] = field(default_factory=Counter)
    sizes: Int64s = field(default_factory=lambda: np.empty((0, 2), np.int64))
    lengths: dict[str, Int64s] = field(default_factory=dict)
    refused: dict[str, Refused] = field(default_factory=dict)
    doubts: Doubts = field(default_factory=dict)
    openings: list[Int64s] = field(default_factory=list)

    def num_held(self, share: Share) -> int:
        """Samples that a share for validation holds back."""
        return sum(int(held_out(one, share.fraction).sum()) for one in self.openings)

    def as_json(self) -> dict[str, Any]:
        """Plain figures: percentiles in place of columns."""
        return {
            "samples": self.samples,
            "keys": dict(self.keys.most_common(MAX_KEYS)),
            "samples_without_image": self.images[0],
            "images": {str(count): self.images[count] for count in sorted(self.images)},
            "image_width": percentiles(self.sizes[:, 0]),
            "image_height": percentiles(self.sizes[:, 1]),
            **{name: percentiles(column) for name, column in self.lengths.items()},
            "refused": {
                name: {"samples": each.count, "reasons": each.reasons}
                for name, each in sorted(self.refused.items())
            },
        }


def percentiles(column: Int64s) -> dict[int, int]:
    """Percentile -> value; empty for an empty column."""
    if not column.size:
        return {}
    return {p: int(np.percentile(column, p, method="nearest")) for p in PERCENTILES}


def source_stats(
    stamps: Sequence[ShardStamp], builder: IndexBuilder, directory: Path, *, pairs: bool = False
) -> Iterator[SourceStats]:
    """The figures so far, after each file: the same object, which grows.

    Args:
        pairs: whether the objective compares two answers; records of the other form are refused.

    Raises:
        DataError: a damaged file.
    """
    stats = SourceStats()
    for stamp in stamps:
        shard = load_index(part_for(directory, stamp, builder.rule), builder)
        _add(stats, shard, builder, pairs=pairs)
        yield stats


def _add(stats: SourceStats, shard: ShardIndex, index: IndexBuilder, *, pairs: bool) -> None:
    stamp, indexed, table = shard.stamp, shard.table, measured(shard, index).table()
    rows = indexed.to_pylist()
    columns = (table.column(name).to_pylist() for name in ("error_class", "reason"))
    faults = list(zip(*columns, strict=True))
    if isinstance(index, ShardBuilder):
        good = np.asarray([reason is None for _, reason in faults], dtype=bool)
        for name in COUNTS:
            new = np.asarray(table.column(name).to_numpy(), dtype=np.int64)[good]
            stats.lengths[name] = np.concatenate((stats.lengths.get(name, new[:0]), new))
    for row, (kind, reason) in zip(rows, faults, strict=True):
        if reason is None and (fault := other_form(row["pair"], pairs=pairs)) is not None:
            kind, reason = fault.error_class, fault.reason
        if reason is not None:
            _refuse(stats, kind, reason, f"{stamp.path}, {row['key']}")
    readable = [row for row in rows if row["reason"] is None]
    sizes = [
        oriented_size(image["width"], image["height"], image["orientation"])
        for images in {(r["offset"], r.get("row")): r["images"] for r in readable}.values()
        for image in images  # of a record once: its last sample shows them all
    ]
    stats.samples += len(rows)
    stats.unknown_keys.update(shard.unknown_keys)
    stats.openings.append(indexed.column(OPENING).fill_null(NEVER).to_numpy())
    stats.images.update(len(row["images"]) for row in readable)
    stats.sizes = np.concatenate((stats.sizes, np.asarray(sizes, np.int64).reshape(-1, 2)))
    if isinstance(index, ShardBuilder):
        encodable = [row for row, (_, reason) in zip(rows, faults, strict=True) if reason is None]
        documents = read_documents(index, stamp, encodable)
        for row, document in zip(encodable, documents, strict=True):
            text = text_of(index, stamp, row, or_raise(document))
            doubt = index.lengths.encoder.doubt(text.sample, text.sizes)
            note_doubt(stats.doubts, doubt, f"{stamp.path}, {row['key']}")
    for record in _records(stamp, index, readable):
        ACTIVITY.moved()
        stats.keys.update(list(record))


def _refuse(stats: SourceStats, kind: str, reason: str, where: str) -> None:
    refused = stats.refused.setdefault(kind, Refused())
    refused.count += 1
    same = shape_of(reason)
    known = next((said for said in refused.reasons if shape_of(said) == same), None)
    if known is not None:
        count, first = refused.reasons[known]
        refused.reasons[known] = (count + 1, first)
    elif len(refused.reasons) < MAX_SAID:
        refused.reasons[reason] = (1, where)


def _records(
    stamp: ShardStamp, index: IndexBuilder, rows: Sequence[dict[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    """The records behind some index rows. A table's have the columns that nobody reads, too."""
    if stamp.holds_records:
        file = open_file(index.fetcher, stamp, index.caps, take_all, is_bounded=False)
        with closing(file):
            yield from (record.value or {} for record in file.scan())
    elif stamp.form:
        yield from shard_records(index.fetcher, stamp, index.caps)
    else:
        for document in read_documents(index, stamp, [row for row in rows if not row["branch"]]):
            value = parse_json(or_raise(document).decode("utf-8-sig"))
            assert isinstance(value, dict), "the index has read it"
            yield value
