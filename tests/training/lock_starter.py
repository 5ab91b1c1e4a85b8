"""One starter of runs, as a process without torch: told when to start in which folder, says when it
was inside. Each line on stdin is one start: {"folder", "at", "hold", "guard"}; times in ns of the
machine's monotonic clock."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from vlmpack.errors import RunDirError
from vlmpack.training.run_lock import RunLock


@contextlib.contextmanager
def kernel(path: Path) -> Iterator[None]:
    """The lock under test."""
    lock = RunLock(path)
    lock.take()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def look_then_create(path: Path) -> Iterator[None]:
    """What was there before, as a control: look whose it is, unlink, create."""
    for _ in range(2):
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            try:
                os.kill(int(json.loads(path.read_text())["pid"]), 0)
            except (OSError, ValueError, KeyError):
                time.sleep(0.005)  # the moment between the look and what it leads to, made longer
                path.unlink(missing_ok=True)
                continue
            raise RunDirError("in use") from None
        owner = {"pid": os.getpid(), "host": socket.gethostname()}
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(owner))
        break
    else:
        raise RunDirError("keeps coming back")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


GUARDS = {"kernel": kernel, "look_then_create": look_then_create}


def say(**facts: object) -> None:
    """One line to whoever counts."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Starts until stdin ends."""
    assert "torch" not in sys.modules, "a light process"
    say(ready=os.getpid())
    for line in sys.stdin:
        order = json.loads(line)
        while time.monotonic_ns() < order["at"]:
            pass
        try:
            with GUARDS[order["guard"]](Path(order["folder"], "run.lock")):
                entered = time.monotonic_ns()
                say(inside=entered)
                time.sleep(order["hold"])
                left = time.monotonic_ns()
        except RunDirError as error:
            say(refused=str(error))
            continue
        say(entered=entered, left=left)


if __name__ == "__main__":
    main()
