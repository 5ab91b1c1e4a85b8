"""Energon's index beside a shard: its format by an independent writer, and every disagreement."""

from __future__ import annotations

import io
import re
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest
from support.shard_fakes import key_of, sample_fields, write_shard

from vlmpack.data.index.shard_index import IndexBuilder
from vlmpack.data.shards.energon import check_energon_index
from vlmpack.data.tools.index_shards import ShardReport, index_shards
from vlmpack.errors import DataError
from vlmpack.storage.fetch import LocalFetcher
from vlmpack.storage.sources import FoundShard


def energon_offsets(path: Path) -> list[int]:
    """What Energon 7.4 writes (`WebdatasetPreparator._preprocess_tar`), by tarfile: the header
    offset of the first member of each run of one name, then the offset behind the last member."""
    offsets, last = [], None
    with tarfile.open(path, "r:*") as tar:
        for member in tar:
            match = re.fullmatch(r"((?:.*/|)[^.]+)[.]([^/]*)", member.name)
            if member.isreg() and match and not re.match(r"__[^/]*__($|/)", member.name):
                if match[1] != last:
                    offsets.append(member.offset)
                last = match[1]
        return [*offsets, tar.offset]


def write_index(path: Path, offsets: list[int]) -> None:
    Path(f"{path}.idx").write_bytes(struct.pack(f"<{len(offsets)}Q", *offsets))


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """Six samples; one with a long name, and a folder and a stray file between samples."""
    path = tmp_path / "s-0.tar"
    write_shard(path, ((key_of(n), sample_fields(n)) for n in range(5)))
    with tarfile.open(path, "a", format=tarfile.GNU_FORMAT) as tar:
        folder = tarfile.TarInfo("more")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, data in {"README": b"x", **_named("more/" + "n" * 150)}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


def _named(key: str) -> dict[str, bytes]:
    return {f"{key}.{field}": data for field, data in sample_fields(4).items()}


def report(shard: Path, folder: Path) -> ShardReport:
    found = list(
        index_shards([FoundShard(str(shard))], IndexBuilder(LocalFetcher()), folder, processes=1)
    )
    return found[0]


def test_the_index_that_energon_writes_agrees(shard: Path, tmp_path: Path) -> None:
    assert not report(shard, tmp_path / "i").energon
    offsets = energon_offsets(shard)
    assert len(offsets) == 7
    write_index(shard, offsets)
    found = report(shard, tmp_path / "i")
    assert found.energon and found.fault is None and found.samples == 6


def _moved(offsets: list[int]) -> list[int]:
    return [*offsets[:2], offsets[2] + 512, *offsets[3:]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_moved, "its sample 2 begins at byte"),
        (lambda offsets: offsets[:-2] + offsets[-1:], "it has 5 samples, the shard 6"),
        (lambda offsets: [*offsets[:-1], offsets[-1], offsets[-1]], "it has 7 samples"),
        (lambda offsets: [*offsets[:-1], offsets[-1] - 512], "it ends at byte"),
        (lambda offsets: [*offsets[:-1], 1 << 40], "it ends at byte"),
    ],
)
def test_a_disagreement_is_a_named_error(
    shard: Path, tmp_path: Path, change: Any, reason: str
) -> None:
    offsets = change(energon_offsets(shard))
    assert offsets != energon_offsets(shard)
    write_index(shard, offsets)
    fault = report(shard, tmp_path / "i").fault
    assert isinstance(fault, DataError) and fault.error_class == "integrity"
    assert "Energon's index s-0.tar.idx does not fit the shard" in fault.reason
    assert reason in fault.reason


@pytest.mark.parametrize("data", [b"", b"1234567", b"<html>not an index"])
def test_what_is_no_index_is_named(shard: Path, tmp_path: Path, data: bytes) -> None:
    Path(f"{shard}.idx").write_bytes(data)
    fault = report(shard, tmp_path / "i").fault
    assert isinstance(fault, DataError)
    assert f"has {len(data)} bytes; expected 8 for every sample and for the end" in fault.reason
    assert fault.shard == f"{shard}.idx"


def test_without_an_index_nothing_is_compared(shard: Path) -> None:
    fetcher = LocalFetcher()
    assert check_energon_index(fetcher, fetcher.head(str(shard)), None) is False
