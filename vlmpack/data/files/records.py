"""Open record files by their kind, or all files of a path to be converted.

Training and conversion open files here alike, so what is converted is what would be trained. A path
is a file, a parquet folder, or a folder of save_to_disk. A record that cannot be read has a fault,
and the caller decides what follows.
"""

from __future__ import annotations

import codecs
import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vlmpack.addresses import PYTHON, record_kind, registered_name
from vlmpack.data.columns.form import RecordForm, read_columns
from vlmpack.data.columns.image_columns import NAMES, is_image_column
from vlmpack.data.columns.layouts import fitting
from vlmpack.data.files.record import RecordFile
from vlmpack.data.files.registered import PythonRows, registered_of
from vlmpack.data.files.tables import ArrowRows, ChooseColumns, KeptRows, ParquetRows, take_all
from vlmpack.data.files.texts import CsvRows, JsonItems, JsonLines
from vlmpack.data.shards.naming import SampleCaps, parse_json
from vlmpack.errors import DataError, VlmpackError, schema_error
from vlmpack.storage.fetch import Fetcher, LocalFetcher, ShardStamp
from vlmpack.storage.sources import SPLITS_FILE, STATE_FILE, files_of_folder
from vlmpack.whole_file import open_regular, regular_text
from vlmpack.words import counted, some_of

TEXTS: Mapping[str, Callable[[Fetcher, ShardStamp, SampleCaps], RecordFile]] = {
    "JSONL": JsonLines,
    "JSON": JsonItems,
    "CSV": CsvRows,
    "TSV": partial(CsvRows, delimiter="\t"),
}
TABLES: Mapping[str, type[ParquetRows] | type[ArrowRows]] = {
    "parquet": ParquetRows,
    "arrow": ArrowRows,
}
"""Kind of a file (`addresses.RECORD_FILES`) -> what reads it, here and above."""
_KIND_OF_FORMAT = {"jsonl": "JSONL", "llava": "JSON", "csv": "CSV", "tsv": "TSV"}
FORMATS = ("auto", *_KIND_OF_FORMAT, "hf")
"""What `--format` takes; `auto` goes by a folder, and by the name's end."""
_SHARD_NUMBER = re.compile(r"[-_]?\d+(-of-\d+)?$")


def open_file(
    fetcher: Fetcher,
    stamp: ShardStamp,
    caps: SampleCaps,
    choose: ChooseColumns,
    *,
    kind: str | None = None,
    is_bounded: bool = True,
    kept: KeptRows | None = None,
) -> RecordFile:
    """The records of a file.

    Args:
        choose: names of a table's columns -> those that are read.
        kind: of the file. With None its name's end decides.
        kept: where decoded groups of rows are kept. With None they are kept with the file.
    """
    kind = kind or record_kind(stamp.path)
    assert kind is not None, stamp.path
    if kind == PYTHON:
        name = registered_name(stamp.path)
        return PythonRows(stamp, registered_of(fetcher).sources[name or ""])
    if kind in TEXTS:
        return TEXTS[kind](fetcher, stamp, caps)
    rows = KeptRows() if kept is None else kept
    return TABLES[kind](fetcher, stamp, caps, choose, is_bounded=is_bounded, kept=rows)


@dataclass(frozen=True, slots=True)
class Record:
    """One record.

    Args:
        place: file and line, item or row, for messages.
        size: (width, height) of its image that its boxes are on, where the file says it.
    """

    place: str
    value: Mapping[str, Any] | None
    fault: DataError | None = None
    unused: tuple[str, ...] = ()
    size: tuple[object, object] | None = None


@dataclass(frozen=True, slots=True)
class OpenRecords:
    """The records of a file or folder, in its own order, as often as they are asked for."""

    kind: str
    files: tuple[Path, ...]
    choose: ChooseColumns

    def __iter__(self) -> Iterator[Record]:
        return _records(self.kind, self.files, self.choose)

    def values(self, choose: ChooseColumns) -> Iterator[Mapping[str, Any]]:
        """What can be read of them, from the first on."""
        with closing(_records(self.kind, self.files, choose)) as records:
            yield from (record.value for record in records if record.value is not None)


QUESTION = "Locate every object in the image."


@dataclass(frozen=True, slots=True)
class CocoImages:
    """The images of a COCO file of annotations, each a record: its boxes are the answer.

    Args:
        content: of the file.
        question: asked of each image.
    """

    path: Path
    content: Mapping[str, Any]
    question: str

    def __iter__(self) -> Iterator[Record]:
        content, boxes, place = self.content, defaultdict[object, list[Any]](list), "categories"
        faults: dict[object, str] = {}
        try:
            names = {each["id"]: each["name"] for each in content["categories"]}
            for n, each in enumerate(content["annotations"]):
                place = f"annotations[{n}]"
                if not each.get("iscrowd"):  # a region, which no detector is taught
                    x, y, width, height = each["bbox"]
                    # Sums of decimals are a little off, and may leave the image.
                    box = [x, y, round(x + width, 6), round(y + height, 6)]
                    kind, image = each["category_id"], each["image_id"]
                    if kind not in names:
                        expected = f"an id of 'categories' ({some_of(names, 5) or 'none'})"
                        faults[image] = f"{place} has category_id {kind!r}; expected {expected}"
                    boxes[image].append({"bbox_2d": box, "label": names.get(kind)})
            place = "images"
            images, listed = [], set[object]()
            for n, each in enumerate(content["images"]):
                place = f"images[{n}]"
                if each["id"] in listed:
                    raise ValueError(f"a second image of the id {each['id']!r}")
                listed.add(each["id"])
                size = (each["width"], each["height"]) if "width" in each else None
                images.append((each["id"], each["file_name"], size))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise schema_error(
                "the file has 'images' and 'annotations', and is no COCO file of boxes: "
                f"{place}: {error!r}",
                shard=str(self.path),
            ) from None
        for number, name, size in images:
            said = (("user", f"<image>{self.question}"), ("assistant", "{{objects}}"))
            turns = [{"role": role, "content": text} for role, text in said]
            value = {"messages": turns, "images": [name], "objects": boxes[number]}
            why = faults.get(number) or _misfit([box["bbox_2d"] for box in boxes[number]], size)
            at = f"{self.path}, image {number}"
            yield Record(at, None, schema_error(why)) if why else Record(at, value, size=size)
        for number in (each for each in boxes if each not in listed):
            count = counted(len(boxes[number]), "box", "boxes")
            fault = schema_error(f"has {count}, and 'images' does not list it")
            yield Record(f"{self.path}, image {number}", None, fault)


def _misfit(boxes: Sequence[Sequence[float]], size: tuple[Any, Any] | None) -> str:
    """What is wrong with the boxes of an image; empty where nothing is."""
    if not boxes:
        return "has no box, or regions of iscrowd alone, so there is no answer"
    if size is None or not all(isinstance(side, int | float) for side in size):
        return ""
    width, height = size
    for x1, y1, x2, y2 in boxes:
        if x1 < 0 or y1 < 0 or x2 > width or y2 > height:
            return f"has a box from {x1}, {y1} to {x2}, {y2}, beyond its {width} x {height} pixels"
    return ""


def _coco_content(path: Path) -> Mapping[str, Any] | None:
    """What a COCO file of annotations holds; None for another file."""
    with open_regular(path) as stream:
        if not stream.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
            return None
    with suppress(ValueError, RecursionError):
        content: dict[str, Any] = parse_json(regular_text(path).removeprefix("\ufeff"))
        return content if {"images", "annotations"} <= content.keys() else None
    return None


def open_records(
    path: Path,
    form: str = "auto",
    split: str | None = None,
    *,
    every_column: bool = False,
    question: str | None = None,
) -> OpenRecords | CocoImages:
    """The records of a file or folder, in its own order.

    Args:
        split: the split of a folder; None where it has one only.
        question: asked of each image of a COCO file.

    Raises:
        VlmpackError: there is nothing of that format, or a question and no COCO file.
    """
    if form not in FORMATS:
        raise VlmpackError(f"--format {form}: expected one of {', '.join(FORMATS)}")
    if not path.exists():
        raise VlmpackError(f"{path}: there is no such file or folder")
    choose = take_all if every_column else _columns
    is_folder = path.is_dir()
    if split is not None and (not is_folder or form not in ("auto", "hf")):
        raise VlmpackError(f"--split {split}: only a folder of a data set has splits")
    if is_folder and form not in ("auto", "hf"):
        raise VlmpackError(f"{path}: is a folder; expected one .{form} file")
    if is_folder:
        kind, files = _folder_files(path, split)
    else:
        kind, files = _kind_of(path, form), [path]
        if kind == "JSON" and (content := _coco_content(path)):
            return CocoImages(path, content, question or QUESTION)
    if question is not None:
        raise VlmpackError(f"--question: {path} is no COCO file, and its records ask themselves")
    return OpenRecords(kind, tuple(files), choose)


def _kind_of(path: Path, form: str) -> str:
    """How a file is read, by what is asked or its name's end."""
    if form == "hf":
        return "parquet"
    kind = _KIND_OF_FORMAT[form] if form != "auto" else record_kind(str(path))
    if kind is None:
        raise VlmpackError(
            f"{path}: the name does not say what it is; expected .jsonl, .json, .csv, .tsv, "
            ".parquet or a folder, or --format"
        )
    return kind


def _folder_files(path: Path, split: str | None) -> tuple[str, list[Path]]:
    """The files of one split of a data set, and their kind: those of save_to_disk, or parquet."""
    if (path / SPLITS_FILE).is_file():
        names = sorted(state.parent.name for state in path.glob(f"*/{STATE_FILE}"))
        return _saved_files(path / _chosen(path, names, split))
    if (path / STATE_FILE).is_file():
        if split is not None:
            raise VlmpackError(f"--split {split}: {path} is one split of a data set by itself")
        return _saved_files(path)
    return "parquet", _parquet_files(path, split)


def _saved_files(folder: Path) -> tuple[str, list[Path]]:
    try:
        return "arrow", [Path(name) for name in files_of_folder(folder)]
    except ValueError as error:
        raise VlmpackError(f"{folder}: {error}") from None


def _parquet_files(path: Path, split: str | None) -> list[Path]:
    """The parquet files of one split, by name."""
    files = sorted(path.rglob("*.parquet"))
    if not files:
        raise VlmpackError(
            f"{path}: holds no .parquet file, and is no folder of datasets.save_to_disk. Save "
            "other forms of a data set (scripts) as one of them first"
        )
    splits = {file: _split_name(file.relative_to(path)) for file in files}
    chosen = _chosen(path, sorted(set(splits.values())), split)
    return [file for file in files if splits[file] == chosen]


def _chosen(path: Path, names: Sequence[str], split: str | None) -> str:
    """The split that is meant."""
    if split is None and len(names) > 1:
        raise VlmpackError(f"{path}: holds the splits {', '.join(names)}; choose one by --split")
    if not names or split not in (None, *names):
        raise VlmpackError(f"{path}: no split {split!r}; it holds {', '.join(names) or 'none'}")
    return split or names[0]


def _split_name(path: Path) -> str:
    """`data/train-00000-of-00002.parquet` and `train/0000.parquet` belong to `train`. A folder of a
    configuration between them is part of the name."""
    folders = [part for part in path.parts[:-1] if part != "data"]
    stem = _SHARD_NUMBER.sub("", path.stem)
    return "/".join([*folders, stem] if stem else folders) or "train"


def _records(kind: str, files: Sequence[Path], choose: ChooseColumns) -> Generator[Record]:
    fetcher = LocalFetcher()
    # A record may hold its images as text: it is not parsed again once it is a sample.
    caps = SampleCaps(max_json_bytes=SampleCaps().max_sample_bytes)
    for file in files:
        source = open_file(
            fetcher, fetcher.head(str(file)), caps, choose, kind=kind, is_bounded=False
        )
        with closing(source) as reader, closing(reader.scan()) as scan:
            for record in scan:
                # Lines are counted from 1, as editors do; items and rows from 0.
                number = record.line or record.place.number
                place = f"{file}, {reader.noun} {number}"
                yield Record(place, record.value, record.fault, record.unused)


def _columns(names: Sequence[str]) -> list[str]:
    """The columns that a layout reads which the table may have; all, where it has none."""
    fits = fitting([*names, *(NAMES[:1] if any(map(is_image_column, names)) else ())])
    read = {name for each in fits for name in read_columns(RecordForm(each.name), names)}
    return [name for name in names if name in read or not fits]
