"""Parts wanted as a run goes on: every process makes some, none twice, none waits for ever."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.slow_build import SlowBuild, parts_in

from vlmpack.data.forkserver import worker_context
from vlmpack.data.index.parts import BuildSettings, _lock, build_parts_together
from vlmpack.errors import DataError, VlmpackError

PARTS = 9


@dataclass(frozen=True)
class Job:
    """One process of several.

    Args:
        folder: where the parts go; the log and the errors lie in `notes`.
    """

    folder: Path
    notes: Path
    build: SlowBuild
    rank: int = 0
    world_size: int = 1
    timeout: float = 60.0

    def __call__(self) -> None:
        settings = BuildSettings(
            directory=self.folder,
            stall_timeout_seconds=self.timeout,
            rank=self.rank,
            world_size=self.world_size,
        )
        build_parts_together(parts_in(self.folder, PARTS), self.build, settings, what="index")


def _run(job: Job) -> None:
    try:
        job()
    except DataError as error:
        with (job.notes / "errors").open("a", encoding="utf-8") as stream:
            stream.write(f"{error.shard}: {error.reason}\n")


def start(job: Job) -> multiprocessing.process.BaseProcess:
    process = worker_context().Process(target=_run, args=(job,))  # type: ignore[attr-defined]
    process.start()
    return process


def log(notes: Path) -> list[tuple[str, str]]:
    """(process, part) of each start of a build."""
    words = (notes / "log").read_text().split() if (notes / "log").exists() else []
    return list(zip(words[0::2], words[1::2], strict=True))


NAMES = [f"s{n}.index.part" for n in range(PARTS)]


@pytest.mark.slow
def test_processes_share_the_work_and_make_no_part_twice(tmp_path: Path) -> None:
    build = SlowBuild(str(tmp_path / "log"), seconds=0.3)
    jobs = [start(Job(tmp_path / "i", tmp_path, build, rank, 3)) for rank in range(3)]
    for job in jobs:
        job.join(60)
        assert job.exitcode == 0
    made = log(tmp_path)
    assert sorted(part for _, part in made) == NAMES
    assert len({process for process, _ in made}) > 1, "one process did all"


@pytest.mark.slow
def test_folders_of_their_own_need_nobody(tmp_path: Path) -> None:
    build = SlowBuild(str(tmp_path / "log"), seconds=0.0)
    jobs = [start(Job(tmp_path / str(rank), tmp_path, build, rank, 2)) for rank in range(2)]
    for job in jobs:
        job.join(60)
        assert job.exitcode == 0
    assert sorted(part for _, part in log(tmp_path)) == sorted(2 * NAMES)


@pytest.mark.slow
def test_a_killed_process_is_replaced(tmp_path: Path) -> None:
    slow = start(Job(tmp_path / "i", tmp_path, SlowBuild(str(tmp_path / "log"), seconds=60.0)))
    deadline = time.monotonic() + 60
    while not log(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert slow.pid is not None and slow.is_alive()
    os.kill(slow.pid, signal.SIGKILL)
    slow.join(30)
    Job(tmp_path / "i", tmp_path, SlowBuild(str(tmp_path / "log"), seconds=0.0))()
    assert sorted({part for _, part in log(tmp_path)}) == NAMES


@pytest.mark.slow
def test_every_process_meets_the_error_itself(tmp_path: Path) -> None:
    build = SlowBuild(str(tmp_path / "log"), seconds=0.02, fail=True)
    for job in [start(Job(tmp_path / "i", tmp_path, build, rank, 2)) for rank in range(2)]:
        job.join(60)
        assert job.exitcode == 0
    assert (tmp_path / "errors").read_text().count("damaged") == 2


def test_one_process_begins_with_its_share(tmp_path: Path) -> None:
    Job(tmp_path, tmp_path, SlowBuild(str(tmp_path / "log"), seconds=0.0), rank=1, world_size=3)()
    order = [int(part[1]) for _, part in log(tmp_path)]
    assert order == [1, 4, 7, 0, 2, 3, 5, 6, 8]


def test_a_holder_without_progress_is_named_after_the_timeout(tmp_path: Path) -> None:
    """Another process holds every lock and makes nothing."""
    build = SlowBuild(str(tmp_path / "log"), seconds=0.0)
    job = Job(tmp_path / "i", tmp_path, build, timeout=0.3)
    job()
    held = [lock.open("r+") for lock in (tmp_path / "i").glob("*.lock")]
    assert held
    for stream in held:
        fcntl.flock(stream, fcntl.LOCK_EX)
    for part in parts_in(tmp_path / "i", PARTS):
        Path(part.path).unlink()
    with pytest.raises(DataError, match=r"9 of 9 parts .* missing and process \d+ on"):
        job()
    for stream in held:
        stream.close()
    job()
    assert all(Path(part.path).exists() for part in parts_in(tmp_path / "i", PARTS))


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    other, lock = tmp_path / "other.txt", tmp_path / "index.lock"
    other.write_text("somebody's", encoding="utf-8")
    lock.symlink_to(other)
    with pytest.raises(VlmpackError, match=r"written to .*index\.lock: "), _lock(lock):
        pass
    assert other.read_text(encoding="utf-8") == "somebody's"
    lock.unlink()
    with _lock(lock) as holder:
        assert holder is None, "vacuous"
