"""`vlmpack index`: only new shards are read, damaged ones are named, the exit code says so."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.fault_server import FaultServer
from support.shard_fakes import FakeEncoder, key_of, sample_fields, write_shard, write_shards
from typer.testing import CliRunner, Result

from vlmpack.cli.app import app
from vlmpack.data.index.parts import Part, unwritable
from vlmpack.data.index.shard_index import IndexBuilder, load_index
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.data.tools.index_shards import IndexOne, index_shards, parts_builder
from vlmpack.errors import DataError
from vlmpack.storage.fetch import LocalFetcher
from vlmpack.storage.sources import FoundShard


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def index(folder: Path, processes: int = 1) -> Result:
    return invoke(
        "index", folder / "s-*.tar", "--index-dir", folder / "i", "--processes", processes
    )


def test_what_is_indexed_is_not_read_again(tmp_path: Path) -> None:
    write_shards(tmp_path, 9, per_shard=3)
    first = index(tmp_path)
    assert first.exit_code == 0 and "3 (3 read now, 0 faulty)" in first.output
    parts = {path: path.stat().st_mtime_ns for path in (tmp_path / "i").iterdir()}
    assert len(parts) == 3
    write_shard(tmp_path / "s-0001.tar", [("new", sample_fields(1))])
    second = index(tmp_path)
    assert "3 (1 read now, 0 faulty)" in second.output
    kept = {path: time for path, time in parts.items() if path.stat().st_mtime_ns == time}
    assert kept == parts and len(list((tmp_path / "i").iterdir())) == 4


def test_damaged_shards_are_named_and_the_others_are_kept(tmp_path: Path) -> None:
    write_shards(tmp_path, 12, per_shard=3)
    for name in ("s-0001.tar", "s-0003.tar"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 8])
    write_shard(tmp_path / "s-0004.tar", [(key_of(1), {"json": b"{}"})])
    result = index(tmp_path)
    assert result.exit_code == 1
    faulty = [line for line in result.output.splitlines() if line.startswith("faulty: ")]
    assert ["s-0001.tar" in faulty[0], "s-0003.tar" in faulty[1], len(faulty)] == [True, True, 2]
    assert all("the shard ends inside" in line for line in faulty)
    assert "5 (5 read now, 2 faulty)" in result.output
    assert "bad samples  1 schema" in result.output
    assert len(list((tmp_path / "i").iterdir())) == 3


def test_an_index_made_again_counts_as_read_where_lengths_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path, 3, per_shard=3)
    assert index(tmp_path).exit_code == 0
    (part,) = (tmp_path / "i").iterdir()
    part.write_bytes(b"damaged")

    def fail(*_: object) -> None:
        raise DataError("gone", error_class="transport")

    monkeypatch.setattr("vlmpack.data.tools.index_shards.measured", fail)
    encoder: Any = FakeEncoder()
    builder = parts_builder(LocalFetcher(), SampleCaps(), tmp_path / "i", encoder)
    report = IndexOne(builder, tmp_path / "i")(FoundShard(str(tmp_path / "s-0000.tar")))
    assert report.fault is not None and report.samples == 3
    assert report.was_read


MANY = 17


def many_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """A folder of MANY indexed shards, one sample of which is bad; and the parts opened since."""
    write_shards(tmp_path, 2 * MANY, per_shard=2)
    bad = [(key_of(1), {"json": b"{}"}), ("good", sample_fields(1))]
    write_shard(tmp_path / "s-0003.tar", bad)
    assert index(tmp_path).exit_code == 0
    opened: list[str] = []

    def note(part: Part, builder: Any) -> Any:
        opened.append(Path(part.stamp.path).stem)
        return load_index(part, builder)

    monkeypatch.setattr("vlmpack.data.tools.index_shards.load_index", note)
    return tmp_path / "i", opened


def said(result: Result) -> list[str]:
    """What the command says, except for how long it took and what was read now."""
    lines = re.sub(r"\d[\d,]* read now", "", result.output).splitlines()
    return [line for line in lines if not line.startswith(("seconds", "bytes"))]


def the_part(folder: Path, stem: str) -> Path:
    return next(folder.glob(f"{stem}.*.index.part"))


def test_of_many_shards_no_part_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is that of the parts, and that of few shards, of which no report is kept."""
    folder, opened = many_indexed(tmp_path, monkeypatch)
    kept = index(tmp_path)
    assert opened == [] and f"{MANY} (0 read now, 0 faulty)" in kept.output
    for path in folder.glob("*.reports.part"):
        path.unlink()
    from_parts = index(tmp_path)
    assert len(opened) == MANY and said(kept) == said(from_parts)
    assert any("bad (schema): sample" in line for line in said(kept))
    opened.clear()
    monkeypatch.setattr("vlmpack.data.tools.index_shards.LEAST_KEPT", MANY + 1)
    assert said(index(tmp_path)) == said(kept) and len(opened) == MANY


@pytest.mark.parametrize(
    ("change", "num_read"),
    [
        ("shard_size", 1),
        ("shard_time", 1),
        ("new_shard", 1),
        ("part_gone", 1),
        ("part_size", 1),
        ("part_time", 0),
        ("reports_torn", 0),
        ("other_rule", 0),
    ],
)
def test_of_many_shards_what_changed_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, num_read: int
) -> None:
    folder, opened = many_indexed(tmp_path, monkeypatch)
    shard, part = tmp_path / "s-0001.tar", the_part(folder, "s-0001")
    [reports] = folder.glob("*.reports.part")
    expected, count = ["s-0001"], MANY
    if change == "shard_size":
        write_shard(shard, [("new", sample_fields(1))])
    elif change == "shard_time":
        os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
    elif change == "new_shard":
        write_shard(tmp_path / "s-9999.tar", [("new", sample_fields(1))])
        expected, count = ["s-9999"], MANY + 1
    elif change == "part_gone":
        part.unlink()
    elif change == "part_size":
        with part.open("r+b") as stream:
            status = part.stat()
            stream.truncate(status.st_size - 1)
        os.utime(part, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif change == "part_time":
        os.utime(part, ns=(0, part.stat().st_mtime_ns + 1))
    elif change == "reports_torn":
        reports.write_bytes(reports.read_bytes()[:-20])
        expected = [f"s-{n:04d}" for n in range(MANY)]
    else:
        monkeypatch.setattr("vlmpack.data.tools.index_shards.REPORTS_RULE", "reports-0")
        expected = [f"s-{n:04d}" for n in range(MANY)]
    result = index(tmp_path)
    assert sorted(opened) == expected
    assert f"{count} ({num_read} read now, 0 faulty)" in result.output
    opened.clear()
    assert f"{count} (0 read now, 0 faulty)" in index(tmp_path).output and opened == []


def test_reports_that_cannot_be_kept_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: str, *_: object) -> None:
        raise unwritable(path, OSError(28, "No space left on device"))

    write_shards(tmp_path, 2 * MANY, per_shard=2)
    monkeypatch.setattr("vlmpack.data.tools.index_shards.write_part", fail)
    assert index(tmp_path).exit_code == 0
    assert "the next `vlmpack index` opens each index file again" in caplog.text
    assert "No space left" in caplog.text
    assert not list((tmp_path / "i").glob("*.reports.part"))


@pytest.mark.parametrize("num_good", [0, 1])
def test_shards_without_a_usable_sample_are_a_failure(tmp_path: Path, num_good: int) -> None:
    """Again from the index, too. One usable sample is enough for an index."""
    bad = {"json": b'{"messages": []}'}
    samples = [(key_of(n), sample_fields(n) if n < num_good else bad) for n in range(3)]
    write_shard(tmp_path / "s-0000.tar", samples)
    cut = {"json": sample_fields(1)["json"], "0.png": b"no image"}
    write_shard(tmp_path / "s-0001.tar", [("cut", cut), ("more", bad)])
    for _ in range(2):
        result = index(tmp_path)
        lines = " ".join(result.output.split())
        first = f"bad (schema): sample '{key_of(num_good)}' in {tmp_path}/s-0000.tar: 'messages' is"
        assert first in lines and lines.count("bad (schema)") == 1
        assert f"bad (decode): sample 'cut' in {tmp_path}/s-0001.tar: image '0.png' has" in lines
        assert result.exit_code == (0 if num_good else 1)
        assert ("no usable sample: all 5 samples of these shards" in lines) == (num_good == 0)


@pytest.mark.cases(slow="command1")
@pytest.mark.parametrize("command", [("index",), ("data", "lint")])
def test_listed_shards_are_not_looked_at_again(tmp_path: Path, command: tuple[str, ...]) -> None:
    """A glob's listing has the versions; shards that a brace range names are asked for theirs, and
    so is the name as it is written, which wins over the range."""
    write_shards(tmp_path / "bucket", 9, per_shard=3)
    with FaultServer(tmp_path) as server:
        store = [f"endpoint={server.url}", "allow_private=true", "anonymous=true"]
        options = [part for item in store for part in ("--storage", item)]
        if command == ("index",):
            options += ["--index-dir", str(tmp_path / "i")]
        heads = []
        for pattern in ("s-*.tar", "s-*.tar", "s-{0000..0002}.tar"):
            server.reset()
            result = invoke(*command, f"s3://bucket/{pattern}", *options, "--processes", 1)
            assert result.exit_code == 0, (result.output, result.exception)
            asked = [r.path for r in server.requests if r.method == "HEAD"]
            heads.append(sum(path.endswith(".tar") for path in asked))
    after_reading = 3 if command == ("index",) else 0  # the first time: each is still the same
    assert heads == [after_reading, 0, 1 + 3]


@pytest.mark.slow
def test_many_processes_make_the_same_parts(tmp_path: Path) -> None:
    pattern = sorted(str(p) for p in Path(write_shards(tmp_path, 24, per_shard=3)).parent.glob("*"))
    shards = [FoundShard(path) for path in pattern]
    builder = IndexBuilder(LocalFetcher())
    found = {}
    for processes in (1, 3):
        folder = tmp_path / f"i{processes}"
        reports = list(index_shards(shards, builder, folder, processes=processes))
        assert sorted(report.path for report in reports) == pattern
        assert all(report.was_read and report.samples == 3 for report in reports)
        found[processes] = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found[1] == found[3] and len(found[1]) == 8
