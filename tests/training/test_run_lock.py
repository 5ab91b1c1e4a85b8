"""Starters of one run folder, all at once: never two inside."""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vlmpack.errors import RunDirError
from vlmpack.training.run_lock import RunLock

STARTER = Path(__file__).with_name("lock_starter.py")
STARTERS = 4
HOLD = 0.03
LONG = 30.0


class Starter:
    """One process that starts runs when it is told to."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(STARTER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def heard(self):
        line = self.process.stdout.readline()
        assert line, "a starter has ended by itself"
        return json.loads(line)

    def order(self, folder, *, at=0, hold=HOLD, guard="kernel"):
        order = {"folder": str(folder), "at": at, "hold": hold, "guard": guard}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self):
        """(entered, left), or the words of a refusal."""
        facts = self.heard()
        if "refused" in facts:
            return facts["refused"]
        facts = self.heard()
        return facts["entered"], facts["left"]

    def kill(self):
        """The last moment at which it was surely alive."""
        before = time.monotonic_ns()
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        return before


@pytest.fixture
def starters():
    made = [Starter() for _ in range(STARTERS)]
    for starter in made:
        assert starter.heard()["ready"] == starter.process.pid
    yield made
    for starter in made:
        starter.kill()


def dead_process():
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    return ended.pid


def leave_unlocked(folder, pid):
    """What a run leaves behind that is killed on a file system without locks."""
    owner = {"pid": pid, "host": socket.gethostname()}
    Path(folder, "run.lock").write_text(json.dumps(owner), encoding="utf-8")


def one_round(starters, folder, guard="kernel"):
    at = time.monotonic_ns() + 3_000_000
    for starter in starters:
        starter.order(folder, at=at, guard=guard)
    return [starter.answer() for starter in starters]


def num_overlaps(spans):
    ordered = sorted(spans)
    return sum(later < left for (_, left), (later, _) in itertools.pairwise(ordered))


def killed_holder(folder):
    """A process inside, ended by SIGKILL: its span, and what it left in the folder."""
    holder = Starter()
    holder.heard()
    holder.order(folder, hold=LONG)
    entered = holder.heard()["inside"]
    return holder, entered


def rounds(starters, tmp_path, count):
    """Folders with nothing, with a dead run's file that was never locked, and with a holder that is
    killed in the moment of the start; the number of those inside, in each round."""
    pid, num_inside = dead_process(), []
    for number in range(count):
        folder = tmp_path / f"round-{number}"
        folder.mkdir()
        kind, spans = number % 3, []
        if kind == 1:
            leave_unlocked(folder, pid)
        if kind == 2:
            holder, entered = killed_holder(folder)
            refused = one_round(starters, folder)
            assert all(f"process {holder.process.pid} on" in text for text in refused), refused
            spans.append((entered, holder.kill()))
            assert (folder / "run.lock").exists(), "it had no time to delete it"
        answers = one_round(starters, folder)
        inside = [answer for answer in answers if not isinstance(answer, str)]
        assert all("is in use by process" in text for text in answers if isinstance(text, str))
        assert num_overlaps([*spans, *inside]) == 0, (number, spans, answers)
        assert inside, f"round {number}: nobody came in: {answers}"
        assert not (folder / "run.lock").exists()
        num_inside.append(len(inside))
    return num_inside


def test_of_four_starters_never_two_are_inside(starters, tmp_path):
    num_inside = rounds(starters, tmp_path, 9)
    assert sum(num_inside) < 9 * STARTERS, "nobody was ever refused: they did not start at once"


@pytest.mark.soak
def test_of_four_starters_never_two_are_inside_in_120_rounds(starters, tmp_path):
    rounds(starters, tmp_path, 120)


def test_two_inside_are_seen_where_the_file_is_looked_at_and_then_made(starters, tmp_path):
    """The rule before this one, with the moment of its race made longer: the count above counts."""
    pid, overlaps = dead_process(), 0
    for number in range(12):
        folder = tmp_path / f"round-{number}"
        folder.mkdir()
        leave_unlocked(folder, pid)
        answers = one_round(starters, folder, guard="look_then_create")
        overlaps += num_overlaps([answer for answer in answers if not isinstance(answer, str)])
        if overlaps:
            break
    assert overlaps


def test_a_refusal_names_process_machine_and_time(tmp_path):
    lock = RunLock(tmp_path / "run.lock")
    lock.take()
    holder = rf"process {os.getpid()} on {socket.gethostname()} since \d{{4}}-\d\d-\d\d \d\d:\d\d:"
    with pytest.raises(RunDirError, match=f"in use by {holder}.* UTC; wait for it, or choose"):
        RunLock(tmp_path / "run.lock").take()
    lock.release()
    assert not (tmp_path / "run.lock").exists()
    RunLock(tmp_path / "run.lock").take()


def test_a_holder_that_has_not_written_yet_is_another_process(tmp_path, monkeypatch):
    monkeypatch.setattr("vlmpack.training.run_lock.READ_SECONDS", 0.05)
    path = tmp_path / "run.lock"
    leave_unlocked(tmp_path, dead_process())
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunDirError, match="in use by another process; wait"):
            RunLock(path).take()


def test_a_number_that_went_to_another_process_does_not_block(tmp_path):
    """A killed run that had no lock, whose process number is another process's now."""
    leave_unlocked(tmp_path, os.getppid())
    path = tmp_path / "run.lock"
    with pytest.raises(RunDirError, match=f"in use by process {os.getppid()} on"):
        RunLock(path).take()  # its parent, who was there when the file was written: a live run
    os.utime(path, (0, 0))  # written long before that process began
    lock = RunLock(path)
    lock.take()
    assert json.loads(path.read_text(encoding="utf-8"))["locked"] is True
    lock.release()


def test_a_reused_number_does_not_block_where_the_kernel_kept_the_lock(tmp_path):
    path = tmp_path / "run.lock"
    owner = {"pid": os.getppid(), "host": "elsewhere", "since": "then", "locked": True}
    path.write_text(json.dumps(owner), encoding="utf-8")
    RunLock(path).take()


def test_a_file_system_without_locks_is_told_and_guarded_by_what_is_written(
    tmp_path, monkeypatch, caplog
):
    def none(descriptor, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    path = tmp_path / "run.lock"
    with caplog.at_level(logging.WARNING, "vlmpack"):
        RunLock(path).take()
    assert "keeps no locks (Function not implemented)" in caplog.text
    owner = json.loads(path.read_text(encoding="utf-8"))
    assert owner["locked"] is False
    path.write_text(json.dumps({**owner, "pid": os.getppid()}), encoding="utf-8")
    with pytest.raises(RunDirError, match=f"in use by process {os.getppid()} on"):
        RunLock(path).take()
    path.write_text(json.dumps({**owner, "pid": dead_process()}), encoding="utf-8")
    RunLock(path).take()


def test_a_deleted_lock_does_not_delete_the_next_one(tmp_path):
    path = tmp_path / "run.lock"
    first, second = RunLock(path), RunLock(path)
    first.take()
    path.unlink()  # by hand
    second.take()
    first.release()
    assert path.exists()
    second.release()
    assert not path.exists()


def test_a_holder_that_leaves_between_open_and_lock_lets_only_one_in(tmp_path, monkeypatch):
    """Opened before the holder deleted it: the lock of a file that is nobody's name any more."""
    path = tmp_path / "run.lock"
    first, late, third = RunLock(path), RunLock(path), RunLock(path)
    first.take()
    flock = fcntl.flock

    def leave_first(descriptor, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        first.release()
        third.take()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", leave_first)
    with pytest.raises(RunDirError, match="in use by process"):
        late.take()
    third.release()


def test_what_starts_a_process_does_not_hand_the_lock_on(tmp_path):
    """A loader's process or a tracker's that outlives its killed run holds nothing."""
    code = (
        "import subprocess, sys, pathlib\n"
        "from vlmpack.training.run_lock import RunLock\n"
        "RunLock(pathlib.Path(sys.argv[1])).take()\n"
        "child = subprocess.Popen(['sleep', '60'], close_fds=False)\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    path = tmp_path / "run.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(RunDirError, match=f"process {holder.pid} on"):
            RunLock(path).take()
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        RunLock(path).take()
    finally:
        os.kill(child, signal.SIGKILL)
        holder.communicate()


def test_a_lock_that_cannot_be_written_is_named(tmp_path: Path):
    lock = tmp_path / "run.lock"
    lock.mkdir()
    with pytest.raises(RunDirError, match=r"run\.lock cannot be locked \(Is a directory\)"):
        RunLock(lock).take()


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path, exists: bool):
    other, lock = tmp_path / "other.txt", tmp_path / "run.lock"
    if exists:
        other.write_text("somebody's", encoding="utf-8")
    lock.symlink_to(other)
    with pytest.raises(RunDirError, match=r"run\.lock cannot be locked \(it is a link\)"):
        RunLock(lock).take()
    assert other.exists() == exists and lock.is_symlink()
    assert not exists or other.read_text(encoding="utf-8") == "somebody's"


def test_a_link_that_comes_while_the_lock_is_held_is_left_alone(tmp_path: Path):
    lock = tmp_path / "run.lock"
    held = RunLock(lock)
    held.take()
    lock.rename(tmp_path / "moved")
    lock.symlink_to(tmp_path / "moved")  # the very file, by another way
    held.release()
    assert lock.is_symlink(), "what the holder did not make stays"
