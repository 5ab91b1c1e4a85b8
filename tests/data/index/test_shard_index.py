"""The index: one pass, bad samples kept with a reason, only changed shards read again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.shard_fakes import (
    FakeEncoder,
    chat_json,
    image_bytes,
    key_of,
    sample_fields,
    write_shard,
    write_shards,
)

from vlmpack.activity import ACTIVITY
from vlmpack.data.index.lengths import LengthsBuilder, open_lengths
from vlmpack.data.index.parts import BuildSettings, Part, part_for, read_part
from vlmpack.data.index.shard_index import IndexBuilder, ShardIndex, open_index
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.errors import DataError
from vlmpack.storage.fetch import LocalFetcher
from vlmpack.storage.sources import expand_shards

BUILDER = IndexBuilder(LocalFetcher())


def index_of(pattern: str | Path, folder: Path, **options: Any) -> list[ShardIndex]:
    settings = BuildSettings(directory=folder, **options)
    return open_index(expand_shards([str(pattern)], key="k"), BUILDER, settings)


def rows_of(pattern: str | Path, folder: Path) -> list[dict[str, Any]]:
    return [row for index in index_of(pattern, folder) for row in index.table.to_pylist()]


def test_rows_describe_the_samples(tmp_path: Path) -> None:
    rows = rows_of(write_shards(tmp_path, 7, per_shard=3), tmp_path / "i")
    assert [row["key"] for row in rows] == [key_of(n) for n in range(7)]
    assert [len(row["images"]) for row in rows] == [0, 1, 2, 0, 1, 2, 0]
    assert rows[1]["images"][0] == {"width": 9, "height": 20, "format": "PNG", "orientation": 1}
    assert all(row["reason"] is None and row["num_turns"] == 2 for row in rows)
    assert rows[2]["fields"] == ["0.png", "1.png", "json"], "the order in which webdataset writes"
    data = (tmp_path / "s-0000.tar").read_bytes()
    start = rows[1]["json_offset"]
    assert data[start : start + rows[1]["json_length"]] == sample_fields(1)["json"]


def test_only_changed_shards_are_read_again(tmp_path: Path, monkeypatch: Any) -> None:
    pattern = write_shards(tmp_path, 9, per_shard=3)
    read: list[str] = []
    original = LocalFetcher.open

    def spy(self: LocalFetcher, stamp: Any) -> Any:
        read.append(Path(stamp.path).name)
        return original(self, stamp)

    monkeypatch.setattr(LocalFetcher, "open", spy)
    first = rows_of(pattern, tmp_path / "i")
    assert sorted(read) == ["s-0000.tar", "s-0001.tar", "s-0002.tar"]
    read.clear()
    assert rows_of(pattern, tmp_path / "i") == first
    assert read == []
    write_shard(tmp_path / "s-0001.tar", [("new", sample_fields(1))])
    assert [row["key"] for row in rows_of(pattern, tmp_path / "i")][3:5] == ["new", key_of(6)]
    assert read == ["s-0001.tar"]


def test_content_digest_survives_a_move_and_a_touch(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", 3, per_shard=3)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "other.tar").write_bytes((tmp_path / "a" / "s-0000.tar").read_bytes())
    os.utime(tmp_path / "b" / "other.tar", (1, 1))
    one, two = (index_of(tmp_path / name, tmp_path / "i")[0] for name in ("a/*.tar", "b/*.tar"))
    assert one.content == two.content
    write_shards(tmp_path / "c", 3, per_shard=3, start=1)
    assert index_of(tmp_path / "c/*.tar", tmp_path / "i")[0].content != one.content


def test_a_damaged_part_is_made_again(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, 4, per_shard=4)
    first = rows_of(pattern, tmp_path / "i")
    (part,) = (tmp_path / "i").glob("*.part")
    good = part.read_bytes()
    for damaged in (b"", good[:100], good[:200] + b"\xff" * 40 + good[240:]):
        part.write_bytes(damaged)
        assert rows_of(pattern, tmp_path / "i") == first


def test_no_temporary_files_stay_behind(tmp_path: Path) -> None:
    rows_of(write_shards(tmp_path, 4, per_shard=2), tmp_path / "i")
    suffixes = {path.suffix for path in (tmp_path / "i").iterdir()}
    assert suffixes == {".part", ".lock"}


def test_damaged_shards_are_errors_whatever_the_policy(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, 9, per_shard=3)
    for name in ("s-0001.tar", "s-0002.tar"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"s-0001.tar.*1 more shards are faulty: .*s-0002.tar"):
        index_of(pattern, tmp_path / "i")
    names = {path.name.split(".")[0] for path in (tmp_path / "i").glob("*.part")}
    assert names == {"s-0000"}, "the good shard's part is kept, no damaged one has a part"


@pytest.mark.parametrize("body", [b"", b"<html>404</html>", b"<html>" + b" " * 4096])
def test_empty_and_html_shards(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "s.tar").write_bytes(body)
    with pytest.raises(DataError, match=r"s\.tar"):
        index_of(tmp_path / "s.tar", tmp_path / "i")


BAD_SAMPLES = {
    "nojson": ({"jpg": image_bytes(8, 8, kind="JPEG")}, "integrity", "no '.json' member"),
    "pickled": ({"json": chat_json("q", "a"), "pkl": b"x"}, "integrity", "pickle"),
    "count": ({"json": chat_json("q", "a", 2), "0.png": image_bytes(8, 8)}, "schema", "2 image"),
    "broken": ({"json": chat_json("q", "a", 1), "0.jpg": b"not a jpeg"}, "decode", "readable"),
    "notjson": ({"json": b"{"}, "schema", "cannot be parsed"),
}


def test_bad_samples_stay_as_rows_with_a_reason(tmp_path: Path) -> None:
    samples = [(key, fields) for key, (fields, _, _) in BAD_SAMPLES.items()]
    write_shard(tmp_path / "s.tar", [("good", sample_fields(2)), *samples])
    rows = {row["key"]: row for row in rows_of(tmp_path / "s.tar", tmp_path / "i")}
    assert rows["good"]["reason"] is None
    assert len(rows) == 1 + len(BAD_SAMPLES)
    for key, (_, error_class, reason) in BAD_SAMPLES.items():
        assert rows[key]["error_class"] == error_class, key
        assert reason in rows[key]["reason"], key


def test_too_many_images(tmp_path: Path) -> None:
    write_shard(tmp_path / "s.tar", [("a", sample_fields(0, num_images=3))])
    builder = IndexBuilder(LocalFetcher(), SampleCaps(max_images=2))
    (index,) = open_index(
        [str(tmp_path / "s.tar")], builder, BuildSettings(directory=tmp_path / "i")
    )
    assert index.table.to_pylist()[0]["reason"] == "3 images; at most 2 are allowed"


def test_duplicate_keys_are_flagged_on_both_sides(tmp_path: Path) -> None:
    names = ["a", "b", "a", "c"]
    write_shard(tmp_path / "s.tar", [(name, sample_fields(n)) for n, name in enumerate(names)])
    rows = rows_of(tmp_path / "s.tar", tmp_path / "i")
    assert [row["error_class"] for row in rows] == ["integrity", None, "integrity", None]
    assert "occurs 2 times" in rows[0]["reason"]
    assert str(rows[2]["offset"]) in rows[0]["reason"]


def test_members_that_are_not_adjacent_are_flagged(tmp_path: Path) -> None:
    parts = [
        ("a", {"json": chat_json("q", "a", 1)}),
        ("b", sample_fields(0)),
        ("a", {"0.png": image_bytes(8, 8)}),
    ]
    write_shard(tmp_path / "s.tar", parts)
    rows = rows_of(tmp_path / "s.tar", tmp_path / "i")
    assert [row["error_class"] for row in rows] == ["integrity", None, "integrity"]
    assert "not adjacent" in rows[0]["reason"]


def test_the_same_key_in_two_shards_is_fine(tmp_path: Path) -> None:
    for name in ("x", "y"):
        write_shard(tmp_path / f"s-{name}.tar", [("a", sample_fields(0))])
    assert [row["reason"] for row in rows_of(tmp_path / "s-*.tar", tmp_path / "i")] == [None, None]


def test_progress_is_told(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    pattern = write_shards(tmp_path, 4, per_shard=2)
    index_of(pattern, tmp_path / "i", progress=lambda *state: seen.append(state))
    assert seen == [("index", 0, 2), ("index", 1, 2), ("index", 2, 2)]


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, 2, per_shard=2)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"data\.index_dir"):
        index_of(pattern, tmp_path / "file" / "i")


@pytest.mark.slow
def test_pool_gives_the_same_parts(tmp_path: Path, monkeypatch: Any) -> None:
    pattern = write_shards(tmp_path, 20, per_shard=2)
    serial = rows_of(pattern, tmp_path / "one")
    monkeypatch.setattr("vlmpack.data.index.parts.POOL_MIN_BYTES", 0)
    pooled = index_of(pattern, tmp_path / "two", max_processes=2)
    assert [row for index in pooled for row in index.table.to_pylist()] == serial
    assert len(serial) == 20


def test_a_part_is_tied_to_size_version_and_rule(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "s.tar", [("a", sample_fields(0))])
    stamp = LocalFetcher().head(str(path))
    first = part_for(tmp_path, stamp, BUILDER.rule)
    os.utime(path, (1, 1))
    second = part_for(tmp_path, LocalFetcher().head(str(path)), BUILDER.rule)
    assert len({first.path, second.path, part_for(tmp_path, stamp, "other-1").path}) == 3
    assert read_part(Part(stamp, str(tmp_path / "none")).path) is None


def test_every_sample_that_is_indexed_or_measured_is_progress(tmp_path: Path) -> None:
    """The watchdog calls it a stall where nothing moves, and a local shard is read without a
    store that would say so."""
    path = tmp_path / "s.tar"
    write_shard(path, [(key_of(number), sample_fields(number)) for number in range(12)])
    begun = ACTIVITY.beats
    [found] = open_index([str(path)], BUILDER, BuildSettings(directory=tmp_path / "i"))
    assert found.num_samples == 12
    assert ACTIVITY.beats - begun >= 12
    begun = ACTIVITY.beats
    lengths = LengthsBuilder(BUILDER, tmp_path / "i", FakeEncoder())
    open_lengths([found], lengths, BuildSettings(directory=tmp_path / "i"))
    assert ACTIVITY.beats - begun >= 12
