"""The process that the ranks of tests fork from: it has imported what they need, and no more.

    python -m support.rank_server MODULE [MODULE ...]

Imports the modules, answers {"ready": true}, then for each request, a line of JSON on stdin, forks
the processes that it asks for, waits until they have ended and answers with their exit codes. It
ends where stdin does, and ends its ranks with it. `support.forked` is the other side.

A thread of the server would be lost in a fork, and with it the locks that it holds and the numbers
that its pool was to compute. So the server refuses to fork when it has a second one.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

SECONDS_TO_END = 10.0
"""From SIGTERM to SIGKILL for the other ranks of one that failed."""
SECONDS_TO_SAY = 1.0
"""From the signal that asks ranks in time's last second where they are, to SIGKILL."""


def serve(modules: list[str]) -> Callable[[], Any] | None:
    """Answer requests; in a rank, what it has to run; in the server, None at the end."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a rank would write to every page of what it shares
    _say(answers, {"ready": True})
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        threads = _threads()
        if threads != 1:
            _say(answers, {"error": f"the server has {threads} threads, so it cannot be forked"})
            continue
        pids: list[int] = []
        for rank in range(request["processes"]):
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, pids[0] if pids else 0)
                answers.close()
                return _rank(rank, request)
            os.setpgid(pid, pids[0] if pids else pid)
            pids.append(pid)
        _say(answers, _wait(pids, request["timeout"]))
    return None


def _say(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _threads() -> int:
    """Those of the operating system, where it says; Python knows only its own."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 1


def _rank(rank: int, request: dict[str, Any]) -> Callable[[], Any]:
    """Become a rank: its own environment, folder, streams and arguments."""
    out = Path(request["folder"])
    for stream, target in (
        (os.open(os.devnull, os.O_RDONLY), 0),
        (os.open(out / f"{rank}.out", os.O_WRONLY | os.O_CREAT), 1),
        (os.open(out / f"{rank}.err", os.O_WRONLY | os.O_CREAT), 2),
    ):
        os.dup2(stream, target)
        os.close(stream)
    # In C, so in a call that never returns too.
    faulthandler.register(signal.SIGUSR2, (out / f"{rank}.stack").open("w"), all_threads=False)
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["processes"] > 1:
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    os.chdir(request["cwd"])
    sys.argv = [request["path"], *request["arguments"]]
    # As a fresh process does at import; random does it itself. Ranks that only agree because they
    # draw the same numbers would otherwise pass.
    for name, draw in (("torch", "seed"), ("numpy.random", "seed")):
        if name in sys.modules:
            getattr(sys.modules[name], draw)()
    if request["is_module"]:
        return partial(runpy.run_module, request["path"], run_name="__main__", alter_sys=True)
    return partial(runpy.run_path, request["path"], run_name="__main__")


def _wait(pids: list[int], timeout: float) -> dict[str, Any]:
    """Exit codes by rank, negative for a signal. One that fails ends the others."""
    codes: dict[int, int] = {}
    deadline, timed_out, first = time.monotonic() + timeout, False, None
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) and first is None:
            first = next(pids.index(pid) for pid, code in codes.items() if code)
            deadline = time.monotonic() + SECONDS_TO_END
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGTERM)
        if time.monotonic() > deadline:
            if first is None and not timed_out:
                timed_out = True
                os.killpg(pids[0], signal.SIGUSR2)
                time.sleep(SECONDS_TO_SAY)
            os.killpg(pids[0], signal.SIGKILL)
        # Requests come one at a time, so that nothing but the end can come meanwhile.
        if select.select([0], [], [], 0.01)[0]:
            os.killpg(pids[0], signal.SIGKILL)
            sys.exit("the test that asked for these ranks has ended")
    return {"codes": [codes[pid] for pid in pids], "first": first, "timed_out": timed_out}


if __name__ == "__main__":
    work = serve(sys.argv[1:])
    if work is not None:
        work()
