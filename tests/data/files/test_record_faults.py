"""What goes wrong with files of records, for each kind of them.

Errors of which nobody can tell how much is lost end the run whatever the policy; those of one
record are holes of it where the policy says so.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import record_data
from support.record_data import COUNT, KINDS, TEXTS, record, save_to_disk, write_records
from support.shard_fakes import image_bytes, micro_batches, open_data

from vlmpack.data.loading.read import SkippedSample
from vlmpack.data.pipeline import TrainData
from vlmpack.errors import DataError, EmptyDataError, RecipeError
from vlmpack.recipe.sources import Source

SKIP = {"integrity": "skip", "schema": "skip", "decode": "skip"}
OF_PATHS = tuple(kind for kind in KINDS if kind not in ("parquet of bytes", "arrow"))
"""Kinds whose records name images; `arrow of paths` is one more."""


def each_of(*kinds: str) -> list[Any]:
    """Kinds, of which one of texts and one of tables are quick."""
    quick = ("jsonl", "csv", "parquet", "arrow")
    return [k if k in quick else pytest.param(k, marks=pytest.mark.slow) for k in kinds]


def opened(path: str, index_dir: Path, **changes: Any) -> TrainData:
    changes.setdefault("shuffle", "global")
    return open_data("", index_dir, sources=(Source(name="d", path=path),), **changes)


def holes_of(data: TrainData) -> list[SkippedSample]:
    """Those of one epoch."""
    batches = micro_batches(data, data.steps_per_epoch())
    holes = [hole for micro in batches for hole in micro.skipped]
    assert len(holes) + sum(len(m.samples) for m in batches) == data.fitted.table.num_samples
    return holes


def file_of(path: str) -> Path:
    """The file itself, or the first of a folder."""
    return next(iter(sorted(Path(path).glob("*.arrow"))), Path(path))


def written(tmp_path: Path, kind: str) -> str:
    """The records as a kind of file; `arrow of paths` beside those of KINDS."""
    if kind != "arrow of paths":
        return write_records(tmp_path, kind, range(COUNT))
    table = pa.Table.from_pylist([record_data.record(number) for number in range(COUNT)])
    folder = save_to_disk(image_root(tmp_path, kind), table)
    record_data.write_pictures(folder, range(COUNT))
    return str(folder)


def image_root(tmp_path: Path, kind: str) -> Path:
    """The folder that paths of images start at: the file's."""
    return tmp_path / "train-folder" if kind == "arrow of paths" else tmp_path


@pytest.mark.cases(quick=0.4, slow="*")
@pytest.mark.parametrize("kind", [*KINDS, "arrow of paths"])
def test_where_nothing_is_wrong_nothing_is_said(tmp_path: Path, kind: str) -> None:
    data = opened(written(tmp_path, kind), tmp_path / "i")
    assert data.fitted.table.num_samples == COUNT and holes_of(data) == []


CUT = {
    "jsonl": "the file ends inside of line 23, which is no JSON; it is cut short",
    "json": "the file is damaged, or cut short; how many records are lost is unknown",
    "csv": "the file ends inside of a quoted cell; it is cut short",
    "tsv": "the file ends inside of a quoted cell; it is cut short",
    "parquet": "the footer cannot be read as parquet",
    "parquet of bytes": "the footer cannot be read as parquet",
    "arrow": "cannot be read as a stream of Arrow batches",
}


@pytest.mark.parametrize("kind", each_of(*KINDS))
def test_a_file_that_is_cut_is_an_error_whatever_the_policy(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind)
    file = file_of(path)
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * 0.61)])
    with pytest.raises(DataError, match=CUT[kind]) as error:
        opened(path, tmp_path / "i", on_error=SKIP)
    assert error.value.error_class == "integrity" and error.value.shard == str(file)


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_a_row_that_is_cut_between_its_cells_is_the_files_end(tmp_path: Path, kind: str) -> None:
    """Behind a closed quote: what is left of the row is no row, and what came behind it is gone."""
    path = Path(written(tmp_path, kind))
    data = path.read_bytes()
    row = data.index(b"\r\nn18") + 2
    path.write_bytes(data[: data.index(b'",[' if kind == "csv" else b'"\t[', row) + 1])
    with pytest.raises(DataError, match=r"inside of row 19, which has 2 cells, and .* 3 names"):
        opened(str(path), tmp_path / "i", on_error=SKIP)
    path.write_bytes(data.rstrip())
    assert holes_of(opened(str(path), tmp_path / "i")) == [], "no line end behind the last row"


def break_page(path: Path) -> None:
    """The fourth row group's first page."""
    at = pq.ParquetFile(path).metadata.row_group(3).column(1).data_page_offset
    overwrite(path, at, b"\xff" * 24)


def break_batch(path: Path) -> None:
    """The second batch's length."""
    overwrite(path, batch_at(path, 1) + 4, b"\x10\0\0\x7f")


def batch_at(path: Path, number: int) -> int:
    """Where a batch of a stream begins."""
    with pa.OSFile(str(path)) as file:
        reader = pa.ipc.open_stream(file)
        for _ in range(number):
            reader.read_next_batch()
        return int(file.tell())


def break_middle(path: Path) -> None:
    """Whatever stands there."""
    overwrite(path, path.stat().st_size // 2, bytes(400))


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(data)


DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "json": (break_middle, "the file is damaged, or cut short; how many records are lost is unkn"),
    "csv": (break_middle, "the file ends inside of a quoted cell"),
    "tsv": (break_middle, "the file ends inside of a quoted cell"),
    "parquet": (break_page, "row group 3 cannot be read as parquet"),
    "parquet of bytes": (break_page, "row group 3 cannot be read as parquet"),
    "arrow": (break_batch, "cannot be read as a stream of Arrow batches"),
}
"""Not `jsonl`, where damage ends with its line."""


@pytest.mark.parametrize("kind", each_of(*DAMAGED))
def test_what_hides_other_records_is_an_error_whatever_the_policy(
    tmp_path: Path, kind: str
) -> None:
    path = written(tmp_path, kind)
    damage, said = DAMAGED[kind]
    damage(file_of(path))
    with pytest.raises(DataError, match=said) as error:
        opened(path, tmp_path / "i", on_error=SKIP)
    assert error.value.error_class == "integrity" and error.value.shard == str(file_of(path))


@pytest.mark.parametrize("batches", [1, 3])
def test_a_stream_that_is_cut_between_two_batches_is_cut_short(
    tmp_path: Path, batches: int
) -> None:
    """What is left is a stream of fewer batches, but for the mark of its end."""
    path = written(tmp_path, "arrow")
    file = file_of(path)
    file.write_bytes(file.read_bytes()[: batch_at(file, batches)])
    with pytest.raises(DataError, match=r"without the mark of a stream's end\. It is cut short"):
        opened(path, tmp_path / "i", on_error=SKIP)


def test_a_text_that_is_no_utf8_is_a_hole_of_its_row(tmp_path: Path) -> None:
    path = written(tmp_path, "arrow")
    file = file_of(path)
    overwrite(file, file.read_bytes().index("ä5".encode()), b"\xff\xfe")
    assert_one_hole(path, tmp_path / "i", "000000005", "cannot be read: 'utf-8' codec")


@pytest.mark.cases(quick=0.3, slow="*")
@pytest.mark.parametrize("seed", range(12))
def test_damage_anywhere_in_a_stream_ends_no_process(tmp_path: Path, seed: int) -> None:
    """Offsets that point out of a batch's memory are found before they are followed."""
    path = written(tmp_path, "arrow")
    file = file_of(path)
    draw = random.Random(seed)
    start, end = batch_at(file, 0), batch_at(file, 1)
    overwrite(file, draw.randrange(start + 8, end - 8) & ~3, b"\xff\xff\xff\x7e")
    try:
        holes = holes_of(opened(path, tmp_path / "i", on_error=SKIP))
    except DataError as error:
        assert error.error_class == "integrity"
        return
    assert len(holes) <= record_data.ROWS_OF_A_GROUP


@pytest.mark.cases(quick=0.4, slow="*")
@pytest.mark.parametrize(
    ("kind", "line", "reason"),
    [
        ("jsonl", b"{oops}\n", "is no JSON"),
        ("jsonl", b'{"messages": "\xff\xfe"}\n', "is no UTF-8"),
        ("jsonl", b'{"messages": "\0"}\n', "is no JSON"),
        ("jsonl", b"[1]\n", "is a list; expected an object"),
        ("jsonl", b'{"messages": []}\n', "'messages' is an empty list"),
        ("csv", b"n9,oops\r\n", "has 2 cells, and the first row 3 names"),
        ("csv", b"n9,\xff\xfe,[]\r\n", "cannot be read: 'utf-8' codec"),
        ("tsv", b"n9\toops\r\n", "has 2 cells, and the first row 3 names"),
    ],
)
def test_a_bad_line_is_a_hole_and_moves_nothing(
    tmp_path: Path, kind: str, line: bytes, reason: str
) -> None:
    path = Path(written(tmp_path, kind))
    lines = path.read_bytes().splitlines(keepends=True)
    at = 9 + (kind != "jsonl")
    lines = lines if kind == "jsonl" else rows_of(path)
    path.write_bytes(b"".join([*lines[:at], line, *lines[at:]]))
    assert_one_hole(str(path), tmp_path / "i", "000000009", reason)


def rows_of(path: Path) -> list[bytes]:
    """The header and the rows of a file whose rows alone end with two bytes."""
    return [row + b"\r\n" for row in path.read_bytes().split(b"\r\n")[:-1]]


def assert_one_hole(path: str, index_dir: Path, key: str, reason: str) -> None:
    """An error, or a hole of that record alone where the policy says so."""
    with pytest.raises(DataError, match=reason):
        opened(path, index_dir, on_error={"schema": "raise", "integrity": "raise"})
    holes = holes_of(opened(path, index_dir, on_error=SKIP))
    [(found, said)] = [(hole.key, hole.reason) for hole in holes]
    assert found == key and reason in said


def changing(monkeypatch: pytest.MonkeyPatch, number: int, **values: Any) -> None:
    """Another record in the place of one."""
    write = record_data.write_pictures

    def changed(n: int) -> dict[str, Any]:
        return record(n) | (values if n == number else {})

    def write_all(folder: Path, numbers: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(record_data, "record", record)
            write(folder, numbers)

    monkeypatch.setattr(record_data, "record", changed)
    monkeypatch.setattr(record_data, "write_pictures", write_all)


@pytest.mark.parametrize("kind", each_of(*KINDS))
def test_a_bad_record_is_a_hole_of_any_kind(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing(monkeypatch, 9, messages=[])
    path = written(tmp_path, kind)
    assert_one_hole(path, tmp_path / "i", "000000009", "'messages' is an empty list")


@pytest.mark.cases(quick=0.3, slow="*")
@pytest.mark.parametrize("kind", [*OF_PATHS, "arrow of paths"])
@pytest.mark.parametrize("name", ["../secret.png", "/etc/hostname", "pictures/link.png"])
def test_a_path_out_of_the_root_is_refused(
    tmp_path: Path, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret.png").write_bytes(image_bytes(20, 20, seed=1))
    folder = tmp_path / "d"
    folder.mkdir()
    name = name.replace("../", "../../") if kind == "arrow of paths" else name
    changing(monkeypatch, 4, images=[name])
    path = written(folder, kind)
    (image_root(folder, kind) / "pictures" / "link.png").symlink_to(tmp_path / "secret.png")
    assert_one_hole(path, tmp_path / "i", "000000004", "lies outside the image root")


@pytest.mark.cases(quick=0.3, slow="*")
@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
def test_another_encoding_is_named(tmp_path: Path, kind: str, encoding: str) -> None:
    path = Path(written(tmp_path, kind))
    text = path.read_bytes().decode().replace("\\u00e4", "ä")
    path.write_bytes(text.encode(encoding))
    said = "UTF-8" if encoding == "latin-1" else "as UTF-16 does; expected UTF-8"
    with pytest.raises((DataError, RecipeError), match=rf"(?i){said}"):
        opened(str(path), tmp_path / "i", on_error=SKIP)
    path.write_bytes(text.encode("utf-8-sig"))
    assert holes_of(opened(str(path), tmp_path / "i")) == [], "a mark in front of UTF-8 is none"


def swapped(data: bytes, other: bytes) -> bytes:
    return data.replace(b"q5", b"q9")


def truncated(data: bytes, other: bytes) -> bytes:
    return data[: len(data) // 2]


def rewritten(data: bytes, other: bytes) -> bytes:
    return other


def grown(data: bytes, other: bytes) -> bytes:
    return data + data[-300:]


@pytest.mark.cases(
    quick=("swapped-jsonl", "truncated-parquet", "rewritten-arrow", "grown-csv"),
    slow="swapped-parquet",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [swapped, truncated, rewritten, grown])
def test_a_file_that_changes_under_the_run_is_found(
    tmp_path: Path, kind: str, how: Callable[[bytes, bytes], bytes]
) -> None:
    """In place. What was read of a table before it changed is what was indexed; text that is behind
    the records of the index is none of theirs."""
    path = written(tmp_path, kind)
    data = opened(path, tmp_path / "i", on_error=SKIP, num_probed=1)
    other = write_records(tmp_path / "other", kind, range(1, COUNT + 1))
    file = file_of(path)
    new = how(file.read_bytes(), file_of(other).read_bytes())
    overwrite(file, 0, new)
    with file.open("r+b") as stream:
        stream.truncate(len(new))
    holes = holes_of(data)
    assert {hole.error_class for hole in holes} <= {"integrity"}
    if how is swapped:
        assert [hole.key for hole in holes] == ["000000005"]
        assert "its bytes changed after they were indexed" in holes[0].reason
    elif how is grown:
        assert holes == []
    elif kind != "parquet" or how is rewritten:
        assert len(holes) >= 9, "half a file's at least, or a quarter where a folder has two"


@pytest.mark.cases(quick=0.3, slow="*")
@pytest.mark.parametrize("kind", [*OF_PATHS, "arrow of paths"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_an_image_that_changed_or_is_gone_behind_the_index_is_named(
    tmp_path: Path, kind: str, is_gone: bool
) -> None:
    path = written(tmp_path, kind)
    data = opened(path, tmp_path / "i", on_error=SKIP, num_probed=1)
    picture = image_root(tmp_path, kind) / "pictures" / "4-0.png"
    if is_gone:
        picture.unlink()
    else:
        overwrite(picture, picture.stat().st_size - 20, b"\x01")
    [hole] = holes_of(data)
    assert (hole.key, hole.error_class) == ("000000004", "integrity")
    said = r"pictures/4-0.png' cannot be read" if is_gone else "changed after they were indexed"
    assert said in hole.reason


def test_an_image_that_was_never_there_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl")
    (tmp_path / "pictures" / "4-0.png").unlink()
    with pytest.raises(DataError, match=r"pictures/4-0.png' cannot be read .*No such file"):
        opened(path, tmp_path / "i", on_error={"integrity": "raise"})


def test_a_file_whose_only_record_is_out_of_reach_is_empty(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"x")
    path = Path(written(tmp_path / "d", "jsonl"))
    line = json.loads(path.read_text().splitlines()[1])
    path.write_text(json.dumps({**line, "images": ["../secret.png"]}) + "\n")
    with pytest.raises(EmptyDataError, match="lies outside the image root"):
        opened(str(path), tmp_path / "i")
