"""Local reads: exact, bounded in open files, and safe to send to a worker."""

from __future__ import annotations

import os
import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.recipes import MINIMAL

from vlmpack.api import run_recipe
from vlmpack.data.files.images import ImageRoot
from vlmpack.data.index.parts import read_part
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.errors import DataError, OpenFilesError, VlmpackError, naming_full_table, writing
from vlmpack.recipe import load_recipe
from vlmpack.storage.fetch import LocalFetcher, ShardStamp, most_open_files


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


@contextmanager
def full_table(free: int = 0) -> Iterator[None]:
    """This process may open `free` files more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(40)]  # what is open leaves gaps
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
    try:
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            for _ in range(free):
                os.close(held.pop())
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_fewer_files_are_kept_open_where_few_may_be(monkeypatch) -> None:
    for most, kept in ((1024, 64), (80, 5), (8, 1), (resource.RLIM_INFINITY, 64)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, most=most: (most, most))
        assert LocalFetcher().max_open_files == most_open_files(64) == kept


READS: dict[str, Callable[[Path], object]] = {
    "read": lambda path: LocalFetcher().read(stamp(path), 0, 4),
    "open": lambda path: LocalFetcher().open(stamp(path)).close(),
    "image": lambda path: ImageRoot(str(path.parent), SampleCaps()).open(path.name).close(),
    "index": lambda path: read_part(str(path)),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_full_table_is_no_fault_of_a_sample(tmp_path: Path, read) -> None:
    """As a DataError a recipe that skips bad samples would leave every one out."""
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    with full_table(), pytest.raises(OpenFilesError, match=r"may open \d+\. .*ulimit -n 4096"):
        read(path)
    with full_table(free=4):
        read(path)


def test_a_full_table_is_named_whatever_raises_it(tmp_path: Path) -> None:
    def clean_up() -> None:
        try:
            os.open("/dev/null", os.O_RDONLY)
        finally:
            raise AttributeError("_workers_status")

    def write() -> None:
        with writing(tmp_path):
            (tmp_path / "y").write_text("")

    with full_table():
        for call in (clean_up, write):
            with pytest.raises(OpenFilesError), naming_full_table():
                call()
    others = {
        RuntimeError("received 0 items of ancdata"): OpenFilesError,
        OSError("Caught OSError in a worker.\n[Errno 24] Too many open files"): OpenFilesError,
        FileNotFoundError(2, "No such file", "Too many open files.jpg"): FileNotFoundError,
        DataError("Too many open files", error_class="schema"): DataError,
        RuntimeError("another"): RuntimeError,
    }
    for error, kind in others.items():
        with pytest.raises(kind) as caught, naming_full_table():
            raise error
        assert isinstance(caught.value, OpenFilesError) == (kind is OpenFilesError)
    assert issubclass(OpenFilesError, VlmpackError) and not issubclass(OpenFilesError, DataError)


def test_a_run_says_so_too(monkeypatch) -> None:
    def launch(*args: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("vlmpack.run.launch.launch", launch)
    with pytest.raises(OpenFilesError):
        run_recipe(load_recipe(MINIMAL))
