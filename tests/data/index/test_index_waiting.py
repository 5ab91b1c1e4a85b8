"""Several processes open the same split: one builds, the others wait for files, none hangs."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from support.slow_build import SlowBuild, parts_in

from vlmpack.data.forkserver import worker_context
from vlmpack.data.index.parts import BuildSettings, build_parts
from vlmpack.errors import DataError


def build(folder: Path, job: SlowBuild, timeout: float = 60.0) -> None:
    settings = BuildSettings(directory=folder, stall_timeout_seconds=timeout)
    build_parts(parts_in(folder), job, settings, what="index")


def _child(folder: Path, job: SlowBuild, errors: str) -> None:
    try:
        build(folder, job)
    except DataError as error:
        with open(errors, "a", encoding="utf-8") as stream:
            stream.write(f"{error.reason}\n")


def start(folder: Path, job: SlowBuild) -> multiprocessing.process.BaseProcess:
    process = worker_context().Process(  # type: ignore[attr-defined]
        target=_child, args=(folder, job, str(folder / "errors"))
    )
    process.start()
    return process


@pytest.mark.slow
def test_each_part_is_built_once_by_one_process(tmp_path: Path) -> None:
    job = SlowBuild(str(tmp_path / "log"))
    processes = [start(tmp_path, job) for _ in range(3)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    lines = (tmp_path / "log").read_text().split()
    assert len(set(lines[0::2])) == 1, "two processes built"
    assert sorted(lines[1::2]) == [f"s{n}.index.part" for n in range(4)]


@pytest.mark.slow
def test_a_waiter_takes_over_from_a_killed_builder(tmp_path: Path) -> None:
    builder = start(tmp_path, SlowBuild(str(tmp_path / "log"), seconds=30.0))
    deadline = time.monotonic() + 60
    while not (tmp_path / "log").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert builder.pid is not None and builder.is_alive()
    os.kill(builder.pid, signal.SIGKILL)
    builder.join(30)
    build(tmp_path, SlowBuild(str(tmp_path / "log"), seconds=0.0))
    assert all(Path(part.path).exists() for part in parts_in(tmp_path))


def test_every_process_gets_the_error_of_a_bad_shard(tmp_path: Path) -> None:
    job = SlowBuild(str(tmp_path / "log"), seconds=0.02, fail=True)
    processes = [start(tmp_path, job) for _ in range(2)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    errors = (tmp_path / "errors").read_text().splitlines()
    assert len(errors) == 2
    assert all("3 more shards are faulty" in error for error in errors)


@pytest.mark.slow
def test_a_stalled_builder_is_named_after_the_timeout(tmp_path: Path) -> None:
    """Another process holds the lock and makes nothing."""
    job = SlowBuild(str(tmp_path / "log"))
    with pytest.raises(DataError):
        build(tmp_path, SlowBuild(str(tmp_path / "log"), fail=True))
    (lock,) = tmp_path.glob("*.lock")
    with lock.open("r+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        begin = time.monotonic()
        with pytest.raises(DataError, match=r"4 of 4 parts .* missing and process \d+ on"):
            build(tmp_path, job, timeout=0.5)
        assert time.monotonic() - begin < 10
