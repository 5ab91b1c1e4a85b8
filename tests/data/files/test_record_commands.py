"""The commands around training on files of records: index, lint, packs, audit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.recipes import run_settings, write_recipe
from support.record_data import COUNT, KINDS, write_records
from support.shard_fakes import open_data
from typer.testing import CliRunner

from vlmpack.cli.app import app
from vlmpack.data.files.samples import RecordFiles, record_number_key
from vlmpack.errors import DataError, VlmpackError
from vlmpack.proof.audit import Audit, check_shards
from vlmpack.recipe.sources import Source
from vlmpack.storage.fetch import LocalFetcher


def run(*command: str) -> tuple[int, str]:
    """The exit code of a command, and what it says."""
    told = CliRunner().invoke(app, list(command))
    if isinstance(told.exception, VlmpackError):
        return told.exception.exit_code, " ".join(str(told.exception).split())
    return told.exit_code, " ".join(told.output.split())


@pytest.mark.parametrize("kind", KINDS)
def test_index_and_lint_read_files_as_training_does(tmp_path: Path, kind: str) -> None:
    path = write_records(tmp_path, kind, range(COUNT))
    code, said = run("index", path, "--index-dir", str(tmp_path / "i"), "--processes", "1")
    assert code == 0 and f"samples {COUNT}" in said and "bad samples none" in said
    code, said = run("data", "lint", path, "--index-dir", str(tmp_path / "i"), "--processes", "1")
    assert code == 0 and f"{COUNT} samples, {COUNT - 1} images" in said and "no fault" in said


def test_lint_tells_an_image_that_cannot_be_decoded_by_its_file(tmp_path: Path) -> None:
    path = write_records(tmp_path, "jsonl", range(COUNT))
    picture = tmp_path / "pictures" / "4-0.png"
    picture.write_bytes(picture.read_bytes()[:-40])
    code, said = run("data", "lint", path, "--index-dir", str(tmp_path / "i"), "--processes", "1")
    assert code == 1 and "000000004" in said and "pictures/4-0.png" in said


def test_columns_and_the_root_of_images_are_options(tmp_path: Path) -> None:
    write_records(tmp_path / "photos", "jsonl", range(3))
    rows = [{"ask": "What?", "say": "7", "pic": "pictures/1-0.png"}]
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["data", "lint", str(path), "--processes", "1", "--index-dir", str(tmp_path / "i")]
    code, said = run(*command)
    assert code == 2 and "no layout fits" in said and "--columns" in said
    columns = "question=ask,answer=say,image=pic"
    code, said = run(*command, "--columns", columns, "--images", str(tmp_path / "photos"))
    assert code == 0 and "1 image" in said
    code, said = run(*command, "--columns", "question=")
    assert code == 2 and "expected role=column" in said


def _audited(path: str, index_dir: Path) -> Audit:
    audit = Audit()
    check_shards(audit, open_data("", index_dir, sources=(Source(name="d", path=path),)))
    return audit


@pytest.mark.parametrize("kind", KINDS)
def test_the_audit_counts_the_records_of_a_file_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = write_records(tmp_path, kind, range(COUNT))
    assert _audited(path, tmp_path / "i").problems == []
    found = RecordFiles.numbers

    def one_more(self, stamp):
        yield from found(self, stamp)
        yield COUNT

    monkeypatch.setattr(RecordFiles, "numbers", one_more)
    [problem, *_] = _audited(path, tmp_path / "i").problems
    assert "never drawn were" in problem and record_number_key(COUNT) in problem


@pytest.mark.parametrize("kind", KINDS)
def test_the_records_of_a_file_are_counted_without_its_images(tmp_path: Path, kind: str) -> None:
    path = Path(write_records(tmp_path, kind, range(COUNT)))
    files, total = RecordFiles(LocalFetcher()), 0
    for file in sorted(path.glob("*.arrow")) if path.is_dir() else [path]:
        numbers = list(files.numbers(LocalFetcher().head(str(file))))
        assert numbers == list(range(len(numbers)))
        total += len(numbers)
    assert total == COUNT


def test_a_folder_of_splits_names_them_and_another_folder_says_what_is_read(
    tmp_path: Path,
) -> None:
    for split in ("train", "test"):
        write_records(tmp_path / split, "arrow", range(3), split)
        (tmp_path / split / f"{split}-folder").rename(tmp_path / f"d-{split}")
    both = tmp_path / "both"
    both.mkdir()
    for split in ("train", "test"):
        (tmp_path / f"d-{split}").rename(both / split)
    (both / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    code, said = run("index", str(both), "--index-dir", str(tmp_path / "i"))
    assert code == 2 and "holds several splits; name one: 'test', 'train'" in said
    code, said = run("index", str(both / "train"), "--index-dir", str(tmp_path / "i"))
    assert code == 0 and "samples 3" in said
    gone = next((both / "train").glob("*00001-of*.arrow"))
    gone.unlink()
    code, said = run("index", str(both / "train"), "--index-dir", str(tmp_path / "i"))
    assert code == 2 and f"lacks {gone.name}, which its state.json names" in said
    code, said = run("index", str(tmp_path), "--index-dir", str(tmp_path / "i"))
    assert code == 2 and "is a folder; name its files" in said


def test_columns_that_are_not_read_are_counted_once_for_a_record_of_branches(
    tmp_path: Path,
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    ask = [{"role": "user", "content": "q"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("a", "b")]
    rows = [{"messages": ask, "branches": answers, "score": 1}] * 3
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    lines = tmp_path / "x.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for file in (path, lines):
        index = ["--index-dir", str(tmp_path / "i"), "--processes", "1"]
        code, said = run("index", str(file), *index)
        assert code == 0 and "samples 6" in said and "'score' (3 records)" in said, said
        code, said = run("data", "lint", str(file), *index)
        assert code == 0 and "6 samples" in said and "'score' (3 records)" in said, said


@pytest.mark.cases(slow="csv")
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "csv",
        "parquet of bytes",
        "arrow",
        *(
            pytest.param(kind, marks=pytest.mark.soak)
            for kind in ("jsonl", "json", "tsv", "parquet")
        ),
    ],
)
def test_inspect_and_show_find_a_record_by_its_number_and_pack_takes_all(
    tmp_path: Path, kind: str
) -> None:
    """Rows of a table share the place of their group: each key must show a row that has it."""
    values = run_settings(
        tmp_path,
        data__train=write_records(tmp_path / "d", kind, range(8)),
        packing__mode="online",
        training__seq_length=80,
        training__micro_batch_size=1,
        training__global_batch_size=1,
    )
    recipe = str(write_recipe(tmp_path / "r.json", values))
    inspect = ("inspect", recipe, "--output", str(tmp_path / "pages"), "--key")
    file = ("--shard", "data-00000" if kind == "arrow" else "train")
    rows = set()
    for number in ("0", "1", "3"):
        key = record_number_key(int(number))
        code, said = run("data", "show", recipe, "--key", number, *file)
        assert code == 0 and f"{key} (" in said and "1 samples" in said, said
        code, said = run(*inspect, number, *file)
        assert code == 0 and f" {key} " in said, said
        rows.add(said.partition(" of the first epoch")[0])
    assert len(rows) > 1, "guard: one row held them all"
    code, said = run("data", "show", recipe, "--key", "8")
    assert code != 0 and "no sample '8'" in said
    code, said = run("pack", recipe, "-o", str(tmp_path / "p"), "--kind", "shards")
    assert code == 0 and "samples 8 (" in said, said


@pytest.mark.parametrize("kind", ["jsonl", "parquet of bytes", "arrow"])
def test_lint_counts_the_records_of_a_table_that_share_an_image(tmp_path: Path, kind: str) -> None:
    numbers = [1, 4, 1, 3, 1, 7]
    path = write_records(tmp_path, kind, numbers)
    code, said = run("data", "lint", path, "--index-dir", str(tmp_path / "i"), "--processes", "1")
    assert code == 0 and "6 samples, 5 images" in said
    assert "3 records with an image that another one has too; 3 with" in said, said


def test_an_arrow_file_with_a_footer_is_named(tmp_path: Path) -> None:
    import pyarrow as pa

    table = pa.table({"messages": ["x"]})
    path = tmp_path / "x.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match=r"an Arrow file with a footer\. Expected a stream"):
        open_data("", tmp_path / "i", sources=(Source(name="d", path=str(path)),))
