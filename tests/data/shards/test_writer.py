"""webdataset writes our shards and reads them; our strict reader reads what webdataset writes."""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
import webdataset as wds
from webdataset.tariterators import group_by_keys, tar_file_expander

from vlmpack.data.shards.naming import SampleCaps
from vlmpack.data.shards.samples import group_members
from vlmpack.data.shards.tar import read_members
from vlmpack.data.shards.writer import ShardWriter

SAMPLES = [
    ("a/000", {"json": b'{"messages": []}', "0.png": b"\x89PNG", "10.jpg": b"x" * 700}),
    ("a/001", {"json": b"{}", "left.png": b""}),
]


def shard() -> bytes:
    stream = io.BytesIO()
    writer = ShardWriter(stream)
    for key, fields in SAMPLES:
        writer.write(key, fields)
    size = writer.size
    writer.close()
    data = stream.getvalue()
    assert data[size:] == bytes(len(data) - size) and data[size - 512 : size] != b""
    return data


def compressed() -> bytes:
    stream = io.BytesIO()
    with gzip.GzipFile("", "wb", fileobj=stream, mtime=0) as packed:
        writer = ShardWriter(packed)  # type: ignore[arg-type]
        for key, fields in SAMPLES:
            writer.write(key, fields)
        writer.close()
    return stream.getvalue()


@pytest.mark.parametrize(("made", "name"), [(shard, "s.tar"), (compressed, "s.tar.gz")])
def test_webdataset_reads_ours(tmp_path: Path, made: Callable[[], bytes], name: str) -> None:
    (tmp_path / name).write_bytes(made())
    with (tmp_path / name).open("rb") as stream:
        found = list(group_by_keys(tar_file_expander([{"stream": stream, "url": name}])))
    assert [one["__key__"] for one in found] == [key for key, _ in SAMPLES]
    for one, (_, fields) in zip(found, SAMPLES, strict=True):
        assert {field: one[field] for field in fields} == fields


@pytest.mark.parametrize("fixed", [{}, {"mtime": 0, "user": "", "group": "", "mode": 0o644}])
def test_our_strict_reader_reads_webdatasets(tmp_path: Path, fixed: dict[str, Any]) -> None:
    path = tmp_path / "theirs.tar"
    with wds.TarWriter(str(path), encoder=False, **fixed) as writer:
        for key, fields in SAMPLES:
            writer.write({"__key__": key, **fields})
    with path.open("rb") as stream:
        members = read_members(
            stream, path.stat().st_size, shard=str(path), max_member_bytes=1 << 20
        )
        found = list(group_members(members, shard=str(path), caps=SampleCaps()))
    assert [one.key for one in found] == [key for key, _ in SAMPLES]
    for one, (_, fields) in zip(found, SAMPLES, strict=True):
        assert {field: one.payload(field) for field in one.fields} == fields
    assert (path.read_bytes() == shard()) is bool(fixed), "the control has another time and owner"


@pytest.mark.parametrize("made", [shard, compressed])
def test_the_same_samples_give_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, made: Callable[[], bytes]
) -> None:
    """At any time: a shard that is written again is the same file to an index and to a cache."""
    first = made()
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert hashlib.sha256(made()).digest() == hashlib.sha256(first).digest()
    data = gzip.decompress(first) if made is compressed else first
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        facts = {(m.mtime, m.mode, m.uid, m.gid, m.uname, m.gname) for m in tar}
    assert facts == {(0, 0o644, 0, 0, "", "")}


@pytest.mark.slow
def test_webdataset_is_not_imported_before_a_shard_is_begun() -> None:
    modules = "vlmpack.convert, vlmpack.data.packs.write, vlmpack.data.shards.writer"
    program = f"import sys, {modules}; sys.exit('webdataset' in sys.modules)"
    assert run([sys.executable, "-c", program], check=False).returncode == 0
