"""A rank that keeps others waiting is named by one that lives, in time; later steps wait less."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.recipes import run_settings, write_recipe
from support.shards import ROOT

WORKER = Path(__file__).with_name("watched_worker.py")
WATCH = 2.0
LATE = 8.0
"""What a loaded machine adds."""


class Said:
    """What a stream brings, line by line, and when."""

    def __init__(self, stream):
        self.lines = []
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream):
        with stream:
            for line in stream:
                self.lines.append((time.monotonic(), line.rstrip()))

    def close(self):
        """After its writers have ended."""
        self._thread.join(10)

    def wait(self, pattern, timeout, since=0.0):
        """The moment and the match of the first line that has it."""
        deadline = time.monotonic() + timeout
        while True:
            for when, line in list(self.lines):
                match = re.search(pattern, line)
                if match and when >= since:
                    return when, match
            assert time.monotonic() < deadline, (pattern, [line for _, line in self.lines])
            time.sleep(0.02)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def two():
    """Two ranks; (process, stdout, stderr) of each."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    made = []
    for rank in range(2):
        process = subprocess.Popen(
            [sys.executable, str(WORKER), str(WATCH)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        made.append((process, Said(process.stdout), Said(process.stderr)))
    yield made
    for process, out, err in made:
        process.kill()
        process.wait()
        out.close()
        err.close()


def told(said):
    return [line for _, line in said.lines if "no progress" in line]


@pytest.mark.slow
def test_a_rank_that_hangs_or_is_stopped_is_named_by_the_one_that_waits(two):
    (_, out, err), (other, other_out, other_err) = two
    begun, _ = out.wait("worked", 60)
    assert told(err) == told(other_err) == [], "nothing is said while all work"
    # It hangs: it lives, and says through the store where.
    when, _ = err.wait(r"no progress for \d s: rank 0 .*: step 40, forward and backward; last", 20)
    assert when - begun < WATCH + LATE
    err.wait(rf"rank 1 \(process {other.pid} on .*\) stands at step 39, waiting for data, last", 1)
    err.wait("in hangs", 1)
    assert told(other_err) == [], "one speaks for all"
    # It is stopped: its entry does not change any more.
    begun, _ = out.wait("hung", 20)
    when, _ = err.wait("no progress", 20, since=begun)
    assert when - begun < WATCH + LATE
    err.wait(
        rf"rank 1 \(process {other.pid} on .*\) has given no sign of life for \d s. It is stopped.*"
        "last heard of at step (39|40), .*, last samples: sample-(39|40)-of-1",
        2 * WATCH,
    )
    os.kill(other.pid, signal.SIGCONT)
    # And what a later step waits for, against the first one, which waits longer.
    out.wait("stopped", 20)
    _, late = out.wait(r"too late ([\d.]+)", 30)
    assert 0.9 < float(late[1]) < 7.0
    assert not any(line.startswith("too late") for _, line in other_out.lines[:2])


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_of_a_run_is_named_in_time_under_torchrun(tmp_path, victim):
    settings = run_settings(
        tmp_path,
        training__max_steps=100_000,
        training__micro_batch_size=2,
        logging__watch_seconds=WATCH,
    )
    recipe = write_recipe(tmp_path / "recipe.yaml", settings)
    launcher = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", "-m", "vlmpack", "finetune", str(recipe)),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    err, metrics = Said(launcher.stderr), tmp_path / "run/metrics.jsonl"
    try:
        deadline = time.monotonic() + 120
        while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= 5):
            assert launcher.poll() is None, err.lines
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (pid,) = [pid for pid in children(launcher.pid) if rank_of(pid) == victim]
        begun = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        when, _ = err.wait(f"no progress.*rank {1 - victim} ", 20, since=begun)
        assert when - begun < WATCH + LATE
        err.wait(rf"rank {victim} \(process {pid} on .*\) has given no sign of life", 10, begun)
    finally:
        for pid in children(launcher.pid):  # each a session of its own, and one of them stopped
            os.kill(pid, signal.SIGKILL)
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
        err.close()


def children(parent):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def rank_of(pid):
    names = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((int(name[5:]) for name in names if name.startswith(b"RANK=")), None)
