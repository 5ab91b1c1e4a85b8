"""Local reads: exact, bounded in open files, and safe to send to a worker."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from vlmpack.errors import DataError
from vlmpack.storage.fetch import LocalFetcher, ShardStamp


def stamp(path):
    """The version that lies there; local reads do not compare it."""
    return ShardStamp(str(path), 0, "")


def test_open_files_are_bounded(tmp_path: Path) -> None:
    fetcher = LocalFetcher(max_open_files=3)
    for number in range(10):
        (tmp_path / f"{number}").write_bytes(bytes([number]) * 10)
    for number in [*range(10), *range(10)]:
        assert fetcher.read(stamp(tmp_path / f"{number}"), 2, 5) == bytes([number]) * 5
        assert len(fetcher._descriptors) <= 3
    fetcher.close()
    assert len(fetcher._descriptors) == 0


def test_open_files_do_not_travel(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    fetcher = LocalFetcher(max_open_files=5)
    fetcher.read(stamp(tmp_path / "x"), 0, 4)
    copy = pickle.loads(pickle.dumps(fetcher))
    assert (copy.max_open_files, len(copy._descriptors)) == (5, 0)
    assert copy.read(stamp(tmp_path / "x"), 4, 4) == b"4567"


def test_a_short_read_is_an_integrity_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    with pytest.raises(DataError, match="4 of 8 bytes found") as caught:
        LocalFetcher().read(stamp(tmp_path / "x"), 6, 8)
    assert (caught.value.error_class, caught.value.offset) == ("integrity", 6)


def test_what_is_not_there_is_a_transport_error(tmp_path: Path) -> None:
    nothing = tmp_path / "none"
    for call in (
        lambda: LocalFetcher().head(str(nothing)),
        lambda: LocalFetcher().open(stamp(nothing)),
    ):
        with pytest.raises(DataError, match="No such file") as caught:
            call()
        assert caught.value.error_class == "transport"
