"""Images that a source has and nobody would read: refused whatever its files are, and in every
command; with either remedy it is read."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.record_data import save_to_disk
from support.shard_fakes import image_bytes, micro_batches, open_data
from typer.testing import CliRunner

from vlmpack.cli.app import app
from vlmpack.data.files.form import FormOptions
from vlmpack.data.files.registered import Registered, RegisteredFetcher
from vlmpack.data.files.source_form import find_forms
from vlmpack.data.files.tables import ParquetRows
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.errors import RecipeError
from vlmpack.recipe.sources import Source
from vlmpack.storage.fetch import LocalFetcher

COUNT = 12
REFUSED = r"nothing reads 'scan', but 12 of the first 12 records .*--columns image=scan"


def records(**columns: Any) -> list[dict[str, Any]]:
    return [{"question": f"Q{n}", "answer": "A", **columns} for n in range(COUNT)]


def write(folder: Path, kind: str, rows: list[dict[str, Any]]) -> str:
    """Records as a file of a kind beside the image that they name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "0.png").write_bytes(image_bytes(20, 20, seed=1))
    path = folder / f"x.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "csv":
        lines = [list(rows[0]), *(map(str, row.values()) for row in rows)]
        path.write_text("".join(",".join(line) + "\n" for line in lines))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path = Path(save_to_disk(folder / "saved", pa.Table.from_pylist(rows)))
        (path / "0.png").write_bytes(image_bytes(20, 20, seed=1))
    return str(path)


def settled(path: str, **options: Any) -> Any:
    fetcher = LocalFetcher()
    names = [str(p) for p in sorted(Path(path).glob("*.arrow"))] if Path(path).is_dir() else [path]
    stamps = [fetcher.head(name) for name in names]
    return find_forms(stamps, FormOptions(**options), fetcher, SampleCaps())


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_a_column_of_images_that_is_not_read_is_refused_in_every_kind_of_file(
    tmp_path: Path, kind: str
) -> None:
    path = write(tmp_path, kind, records(scan="0.png"))
    with pytest.raises(RecipeError, match=REFUSED):
        settled(path)
    with pytest.raises(RecipeError, match=REFUSED):
        open_data("", tmp_path / "i", sources=(Source(name="d", path=path),))
    image = Source(name="d", path=path, columns={"image": "scan"})
    assert micro_batches(open_data("", tmp_path / "i", sources=(image,)), 1)[0].batch.media
    none = open_data("", tmp_path / "i", sources=(image.model_copy(update={"columns": None}),),
                     ignore_columns=("scan",))  # fmt: skip
    assert micro_batches(none, 1)[0].batch.media is None
    assert none.fitted.table.unknown_keys == {}


@pytest.mark.parametrize("name", ["url", "source", "id", "license"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_text_alone_is_never_refused_for_where_it_is_from(
    tmp_path: Path, kind: str, name: str
) -> None:
    path = write(tmp_path, kind, records(**{name: "https://x.org/a.jpg"}))
    data = open_data("", tmp_path / "i", sources=(Source(name="d", path=path),))
    assert micro_batches(data, 1)[0].batch.media is None


def test_a_table_of_images_is_decoded_for_it_only_where_a_column_is_suspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, ...]] = []
    scan = ParquetRows.scan

    def noted(self: ParquetRows) -> Iterator[Any]:
        for record in scan(self):
            read.append(self._columns)
            yield record

    monkeypatch.setattr(ParquetRows, "scan", noted)
    image = {"bytes": image_bytes(20, 20, seed=1), "path": "b.png"}
    settled(write(tmp_path / "a", "parquet", records(image=image, image_id=7, note="x")))
    assert {*read[COUNT:]} == {("image_id", "note")}
    read.clear()
    settled(write(tmp_path / "b", "parquet", records(image=image, file_name="b.png")))
    assert len({*read[COUNT:]}) == 2, "the names are compared"
    with pytest.raises(RecipeError, match="nothing reads 'file_name'"):
        settled(write(tmp_path / "c", "parquet", records(image=image, file_name="c.png")))


def test_a_file_without_a_readable_record_says_why(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", [{f"k{n}": n for n in range(4097)}])
    with pytest.raises(RecipeError, match="no readable record; the first: 4,097 keys or columns;"):
        settled(path)


def test_what_a_program_hands_over_is_looked_at(tmp_path: Path) -> None:
    class Scans(list[Any]):
        pass

    rows = Scans(records(scan="0.png"))
    fingerprints = {"scans": "1", "as_image": "2"}
    known = Registered({"scans": rows}, {"as_image": lambda row: row | {"image": row["scan"]}},
                       fingerprints)  # fmt: skip
    fetcher = RegisteredFetcher(LocalFetcher(), known)
    with pytest.raises(RecipeError, match=REFUSED):
        find_forms([fetcher.head("python:scans")], FormOptions(), fetcher, SampleCaps())
    path = write(tmp_path, "parquet", records(scan="0.png"))
    made = FormOptions(columns="python:as_image")
    assert find_forms([fetcher.head(path)], made, fetcher, SampleCaps())[0].form


def shard(path: Path, name: str, image: bool) -> str:
    """Samples of turns with a column of images in their JSON, and with an image or without."""
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    if image:
        turns[0] = {"role": "user", "content": [{"type": "image"}]}  # type: ignore[dict-item]
    members = {"json": json.dumps({"messages": turns, name: "scans/0.png"}).encode()}
    members |= {"png": image_bytes(20, 20, seed=1)} if image else {}
    with tarfile.open(path, "w") as tar:
        for number in range(COUNT):
            for field, data in members.items():
                info = tarfile.TarInfo(f"{number:03d}.{field}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return str(path)


def test_of_shards_the_samples_without_images_are_looked_at(tmp_path: Path) -> None:
    assert settled(shard(tmp_path / "a.tar", "scan", image=True))[0].form == ""
    assert settled(shard(tmp_path / "b.tar", "url", image=False))[0].form == ""
    for name in ("scan", "image_path"):
        path = shard(tmp_path / f"{name}.tar", name, image=False)
        with pytest.raises(RecipeError, match=f"nothing reads '{name}'"):
            settled(path)
        source = Source(name="d", path=path)
        data = open_data("", tmp_path / "i", sources=(source,), ignore_columns=(name,))
        assert data.fitted.table.unknown_keys == {} and not data.fitted.table.bad.any()


def run(*words: str, code: int = 0) -> str:
    told = CliRunner().invoke(app, list(words))
    assert told.exit_code == code, told.output
    return told.output + str(told.exception or "")


def test_every_command_refuses_it_and_takes_both_remedies(tmp_path: Path) -> None:
    path, cache = write(tmp_path, "parquet", records(scan="0.png")), str(tmp_path / "i")
    for command in (("data", "stats"), ("data", "lint"), ("index",)):
        words = (*command, path, "--index-dir", cache)
        assert "nothing reads 'scan'" in run(*words, code=1)
        run(*words, "--columns", "image=scan")
        run(*words, "--ignore-columns", "scan, other")
    out = str(tmp_path / "out/train")
    convert = ("data", "convert", path, out, "--index-dir", cache, "--overwrite")
    assert "nothing reads 'scan'" in run(*convert, code=1)
    assert "not read" not in run(*convert, "--ignore-columns", "scan")
    run(*convert, "--columns", "image=scan")
    assert "12: 12" not in run("data", "stats", f"{out}-000000.tar", "--index-dir", cache)


def test_launch_stats_and_lint_say_how_many_samples_have_no_image(tmp_path: Path) -> None:
    rows = records(image="0.png")[:5] + records(image="")[:7]
    path, cache = write(tmp_path, "jsonl", rows), str(tmp_path / "i")
    summary = open_data("", tmp_path / "i", sources=(Source(name="d", path=path),)).summary()
    assert (summary.num_without_image, summary.num_usable) == (7, 12)
    assert "7 of 12 samples" in run("data", "stats", path, "--index-dir", cache)
    found = json.loads(run("data", "stats", path, "--index-dir", cache, "--json"))
    assert found["samples_without_image"] == 7 and found["images"] == {"0": 7, "1": 5}
    assert "7 samples without a fault and without an image" in run("data", "lint", path)
    found = json.loads(run("data", "lint", path, "--json"))
    assert found["samples_without_image"] == 7
