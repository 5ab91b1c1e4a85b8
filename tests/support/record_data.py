"""One small data set, written as files of records of every kind, and as the shards of the same."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from support.shard_fakes import image_bytes

from vlmpack.convert import ConvertSettings, convert, open_records

COUNT = 37
ROWS_OF_A_GROUP = 5
TABLES = ("parquet", "parquet of bytes", "arrow")
TEXTS = ("jsonl", "json", "csv", "tsv")
KINDS = (*TEXTS, *TABLES)


def record(number: int) -> dict[str, Any]:
    """A record with 0 to 2 images, which lie in a folder beside it."""
    images = [f"pictures/{number}-{place}.png" for place in range(number % 3)]
    parts = [{"type": "image"} for _ in images]
    text = f'q{number}, "quoted"\nand on' + "x" * (number % 7)
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [*parts, {"type": "text", "text": text}]},
        {"role": "assistant", "content": [{"type": "text", "text": f"ä{number}"}]},
    ]
    return {"id": f"n{number}", "messages": turns, "images": images}


def write_pictures(folder: Path, numbers: Sequence[int]) -> None:
    """The images of some records."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for number in numbers:
        for place, name in enumerate(record(number)["images"]):
            data = image_bytes(8 + number % 40, 20, seed=number * 10 + place)
            (folder / name).write_bytes(data)


def write_records(
    folder: Path,
    kind: str,
    numbers: Sequence[int],
    name: str = "train",
    more: Callable[[int], dict[str, Any]] = lambda number: {},
) -> str:
    """The records as a file of a kind, or a folder; returns its path.

    Args:
        more: number of a record -> keys that it has besides.
    """
    write_pictures(folder, numbers)
    records = [record(number) | more(number) for number in numbers]
    path = folder / f"{name}.{kind.partition(' ')[0]}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(each) + "\n" for each in records))
    elif kind == "json":
        path.write_text(json.dumps(records, ensure_ascii=False, indent=1))
    elif kind in ("csv", "tsv"):
        with path.open("w", newline="") as stream:
            writer = csv.writer(stream, delimiter="," if kind == "csv" else "\t")
            writer.writerow(records[0])
            for each in records:
                keys = [key for key in records[0] if key != "id"]
                cells = (json.dumps(each[key], ensure_ascii=False) for key in keys)
                writer.writerow([each["id"], *cells])
    else:
        if kind != "parquet":
            records = [_with_bytes(each, folder) for each in records]
        table = pa.Table.from_pylist(records)
        if kind == "arrow":
            return str(save_to_disk(folder / f"{name}-folder", table))
        pq.write_table(table, path, row_group_size=ROWS_OF_A_GROUP)
    return str(path)


def _with_bytes(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A record with its images as Hugging Face's Image has them."""
    images = [{"bytes": (folder / name).read_bytes(), "path": name} for name in record["images"]]
    return {**record, "images": images}


def save_to_disk(folder: Path, table: Any, files: int = 2) -> Path:
    """A table as `datasets.save_to_disk` leaves it: streams of Arrow batches, and state.json."""
    folder.mkdir(parents=True)
    each = -(-table.num_rows // files)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        rows = table.slice(number * each, each)
        sink = pa.OSFile(str(folder / name), "wb")
        with sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(rows, max_chunksize=ROWS_OF_A_GROUP)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def write_same_shards(
    folder: Path,
    numbers: Sequence[int],
    *,
    per_shard: int = 10,
    more: Callable[[int], dict[str, Any]] = lambda number: {},
) -> str:
    """The same records as shards, by `vlmpack data convert`; returns their glob."""
    source = write_records(folder, "jsonl", numbers, "source", more)
    settings = ConvertSettings(
        folder=folder / "shards",
        image_root=folder,
        max_shard_samples=per_shard,
        index_dir=folder / "i",
    )
    convert(open_records(Path(source)), settings)
    return str(folder / "shards" / "train-*.tar")
