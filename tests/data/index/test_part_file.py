"""A part is trusted by the digest behind its bytes alone: no flipped bit changes a row."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.shard_fakes import write_shards

from vlmpack.data.index import parts
from vlmpack.data.index.parts import SEAL_BYTES, BuildSettings, read_part, write_part
from vlmpack.data.index.shard_index import IndexBuilder, open_index
from vlmpack.errors import DataError
from vlmpack.storage.fetch import LocalFetcher, ShardStamp
from vlmpack.storage.sources import expand_shards

SAMPLES = 40


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a pattern of one shard, its part)."""
    root = tmp_path_factory.mktemp("part")
    pattern = write_shards(root, SAMPLES, per_shard=SAMPLES)
    rows_of(pattern, root / "i")
    (part,) = (root / "i").glob("*.part")
    return Path(pattern), part


def rows_of(pattern: str | Path, folder: Path) -> list[dict[str, Any]]:
    shards = expand_shards([str(pattern)], key="k")
    builder = IndexBuilder(LocalFetcher())
    (index,) = open_index(shards, builder, BuildSettings(directory=folder))
    rows: list[dict[str, Any]] = index.table.to_pylist()
    return rows


def footer_flips(data: bytes) -> list[bytes]:
    """Parquet files with one flipped bit that load other rows and raise nothing."""
    good = pq.read_table(pa.BufferReader(data))
    for at in range(len(data) - 1500, len(data)):
        found = [wrong for bit in range(8) if (wrong := flip_passed_over(data, at, bit, good))]
        if found:
            return found
    return []


def flip_passed_over(data: bytes, at: int, bit: int, good: Any) -> bytes | None:
    flipped = bytearray(data)
    flipped[at] ^= 1 << bit
    try:
        table = pq.ParquetFile(pa.BufferReader(flipped)).read(use_threads=False)
    except (OSError, pa.ArrowException):
        return None
    return None if table.equals(good) else bytes(flipped)


def test_flips_that_parquet_passes_over_are_found(
    indexed: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    pattern, part = indexed
    good = part.read_bytes()
    wrong = footer_flips(good[:-SEAL_BYTES])
    assert wrong, "else parquet itself notices every flip and this test shows nothing"
    for data in wrong:
        part.write_bytes(data + good[-SEAL_BYTES:])
        assert read_part(str(part)) is None
    first = rows_of(pattern, part.parent)
    assert len(first) == SAMPLES
    assert "damaged" in caplog.text
    assert part.read_bytes() == good


@pytest.mark.parametrize("kept", [0, 0.5, 1])
def test_a_part_that_a_power_cut_tears_is_made_again(
    indexed: tuple[Path, Path], kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are not flushed, so after one a name may have no bytes, or zeros. 1 is the control."""
    pattern, part = indexed
    good, before = part.read_bytes(), part.stat().st_mtime_ns
    if kept < 1:
        part.write_bytes(good[: int(kept * len(good))].ljust(int(2 * kept * len(good)), b"\0"))
    assert (read_part(str(part)) is None) == (kept < 1)
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("a flush for each part takes longer"))
    assert len(rows_of(pattern, part.parent)) == SAMPLES
    assert part.read_bytes() == good
    assert (part.stat().st_mtime_ns == before) == (kept == 1)


@pytest.mark.parametrize(
    ("count", "size", "expected"), [(20_000, 10, 4), (20, 10, 1), (8, 1 << 30, 4), (7, 1 << 30, 1)]
)
def test_many_small_shards_are_worth_a_pool(
    count: int, size: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        parts, "each_shard", lambda *_, processes, **__: asked.append(processes) or []
    )
    some = [parts.Part(ShardStamp("a.tar", size, "1"), "a")] * count
    assert not list(parts._run(some, lambda _: None, BuildSettings(max_processes=4)))
    assert asked == [expected]


def test_a_part_with_fewer_rows_is_made_again(
    indexed: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    pattern, part = indexed
    good = part.read_bytes()
    first = rows_of(pattern, part.parent)
    assert len(first) == SAMPLES and not caplog.records
    table = read_part(str(part))
    sink = pa.BufferOutputStream()
    pq.write_table(table.slice(0, 7), sink)
    for wrong in (sink.getvalue().to_pybytes() + good[-SEAL_BYTES:], b"", good[:-1], good[:900]):
        caplog.clear()
        part.write_bytes(wrong)
        assert rows_of(pattern, part.parent) == first
        assert str(part) in caplog.text and "made again" in caplog.text
    assert part.read_bytes() == good


def test_a_random_share_of_all_flips(indexed: tuple[Path, Path]) -> None:
    _, part = indexed
    good = part.read_bytes()
    draw = random.Random(5)
    copy = part.with_name("copy")
    write_part(str(copy), read_part(str(part)), {})
    sealed = copy.read_bytes()
    assert read_part(str(copy)) is not None
    for place in draw.sample(range(8 * len(sealed)), 300):
        flipped = bytearray(sealed)
        flipped[place // 8] ^= 1 << place % 8
        copy.write_bytes(flipped)
        assert read_part(str(copy)) is None, place
    copy.write_bytes(good)
    assert read_part(str(copy)) is None, "the bytes of another part"
    copy.unlink()


def test_a_part_that_never_reads_back_is_a_named_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = write_shards(tmp_path, 2, per_shard=2)
    monkeypatch.setattr("vlmpack.data.index.parts.open_part", lambda path: None)
    with pytest.raises(DataError, match=r"does not read back.*data\.index_dir"):
        rows_of(pattern, tmp_path / "i")
