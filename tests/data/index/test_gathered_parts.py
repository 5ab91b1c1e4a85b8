"""A warm launch opens one index file and one of lengths, not two for each shard; each is sealed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.shard_fakes import open_data, sample_fields, write_shard, write_shards

from vlmpack.data.index import parts
from vlmpack.data.index.parts import read_part
from vlmpack.errors import DataError
from vlmpack.recipe.sources import Source

SHARDS = 20


@pytest.fixture
def opened(monkeypatch: Any) -> list[str]:
    """Names of the index files that are opened."""
    names: list[str] = []

    def spy(path: str) -> Any:
        names.append(Path(path).name)
        return read_part(path)

    monkeypatch.setattr(parts, "read_part", spy)
    monkeypatch.setattr(parts, "read_part", spy)
    return names


def columns(data: Any) -> dict[str, Any]:
    """All that a split holds of its samples."""
    table = data.fitted.table
    names = ("offsets", "lengths", "crc32s", "num_tokens", "num_label_tokens", "num_patches")
    found = {name: getattr(table, name).tolist() for name in names}
    return found | {"keys": table.keys.to_pylist(), "shards": table.shards, "bad": table.faults}


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.gathered"))


def test_a_second_launch_opens_one_file_of_each_kind(tmp_path: Path, opened: list[str]) -> None:
    pattern = write_shards(tmp_path, 2 * SHARDS, per_shard=2)
    first = open_data(pattern, tmp_path / "i")
    assert len([name for name in opened if name.endswith(".part")]) == 2 * SHARDS
    opened.clear()
    again = open_data(pattern, tmp_path / "i")
    assert sorted(name.partition(".")[2] for name in opened) == [
        "index.gathered",
        "lengths.gathered",
    ]
    assert columns(again) == columns(first)
    assert again.identity == first.identity
    assert len(columns(first)["keys"]) == 2 * SHARDS
    for file in files(tmp_path / "i"):
        file.unlink()
    assert columns(open_data(pattern, tmp_path / "i")) == columns(first), "from the parts"


def test_a_changed_shard_is_read_again(tmp_path: Path, opened: list[str]) -> None:
    pattern = write_shards(tmp_path, 2 * SHARDS, per_shard=2)
    first = open_data(pattern, tmp_path / "i")
    shard = tmp_path / "s-0003.tar"
    was = shard.stat()
    data = bytearray(shard.read_bytes())
    write_shard(shard, [("new", sample_fields(6)), ("newer", sample_fields(7))])
    if shard.stat().st_size == len(data):
        os.utime(shard, ns=(was.st_atime_ns, was.st_mtime_ns + 1))
    opened.clear()
    keys = columns(open_data(pattern, tmp_path / "i"))["keys"]
    assert keys[6:8] == ["new", "newer"]
    assert keys[:6] + keys[8:] == columns(first)["keys"][:6] + columns(first)["keys"][8:]
    assert len([name for name in opened if name.endswith(".part")]) == 2 * SHARDS


@pytest.mark.slow
def test_a_flipped_bit_is_found_and_the_parts_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pattern = write_shards(tmp_path, 2 * SHARDS, per_shard=2)
    first = columns(open_data(pattern, tmp_path / "i"))
    found = files(tmp_path / "i")
    assert len(found) == 2
    for file in found:
        good = file.read_bytes()
        for place in (0, len(good) // 2, len(good) - 700, len(good) - 17, len(good) - 1):
            damaged = bytearray(good)
            damaged[place] ^= 4
            file.write_bytes(damaged)
            caplog.clear()
            assert columns(open_data(pattern, tmp_path / "i")) == first
            assert "is damaged" in caplog.text
            assert file.read_bytes() == good, "written again"
        file.write_bytes(good[:-100])
        assert columns(open_data(pattern, tmp_path / "i")) == first


def test_a_file_of_other_shards_is_not_taken(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, 2 * SHARDS, per_shard=2)
    first = columns(open_data(pattern, tmp_path / "i"))
    there = files(tmp_path / "i")
    other = write_shards(tmp_path / "other", 2 * SHARDS + 2, per_shard=2)
    open_data(other, tmp_path / "j")
    for mine, theirs in zip(there, files(tmp_path / "j"), strict=True):
        mine.write_bytes(theirs.read_bytes())
    assert columns(open_data(pattern, tmp_path / "i")) == first


def test_a_folder_that_cannot_be_written_costs_time_alone(
    tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise DataError("the index cannot be written", error_class="transport")

    monkeypatch.setattr(parts, "write_part", full)
    caplog.set_level("INFO")
    data = open_data(write_shards(tmp_path, 2 * SHARDS, per_shard=2), tmp_path / "i")
    assert len(columns(data)["keys"]) == 2 * SHARDS
    assert "the next launch will read each index file again" in caplog.text


@pytest.mark.slow
def test_old_ones_are_removed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(parts, "LEAST_GATHERED", 1)
    others = tmp_path / "i" / "mine.lengths.gathered"
    others.parent.mkdir()
    others.write_text("mine")
    os.utime(others, (1, 1))
    for count in range(1, parts.MOST_KEPT + 4):
        pattern = write_shards(tmp_path, count, per_shard=1)
        assert len(columns(open_data(pattern, tmp_path / "i"))["keys"]) == count
        newest = max(files(tmp_path / "i"), key=lambda file: file.stat().st_mtime_ns)
        assert newest.name.endswith("lengths.gathered")
    assert len(files(tmp_path / "i")) == 2 * parts.MOST_KEPT + 1
    assert others.read_text() == "mine"


def test_many_sources_share_one_file_of_each_kind(
    tmp_path: Path, opened: list[str], monkeypatch: Any
) -> None:
    """A file for each would be more than are kept, and each launch would make all of them again."""
    monkeypatch.setattr(parts, "LEAST_GATHERED", 2)
    sources = tuple(
        Source(name=f"s{number}", path=write_shards(tmp_path / f"d{number}", 4, per_shard=2))
        for number in range(parts.MOST_KEPT + 2)
    )
    first = open_data("unused", tmp_path / "i", sources=sources)
    opened.clear()
    again = open_data("unused", tmp_path / "i", sources=sources)
    assert sorted(name.partition(".")[2] for name in opened) == [
        "index.gathered",
        "lengths.gathered",
    ]
    assert columns(again) == columns(first)
    assert len(columns(again)["keys"]) == 4 * len(sources)
    assert again.identity == first.identity


def test_a_file_in_use_is_kept(tmp_path: Path, opened: list[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(parts, "LEAST_GATHERED", 1)
    used = write_shards(tmp_path / "used", 4, per_shard=2)
    open_data(used, tmp_path / "i")
    for number in range(parts.MOST_KEPT + 2):
        open_data(write_shards(tmp_path / f"d{number}", 2, per_shard=1), tmp_path / "i")
        opened.clear()
        open_data(used, tmp_path / "i")
        assert not [name for name in opened if name.endswith(".part")]
    assert len(files(tmp_path / "i")) == 2 * parts.MOST_KEPT
