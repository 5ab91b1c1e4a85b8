"""The ranks of a multi-process test, forked from a server instead of launched with torchrun.

Each is a fresh process that has imported torch, transformers and Megatron, which takes seconds, and
computed nothing (`support.rank_server`). Tests of processes, launchers or memory start real ones.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from support.limits import of_a_launch
from support.shards import ROOT

IMPORTED = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "vlmpack.cli",
    "vlmpack.api",
    "vlmpack.run.session",
    "vlmpack.backends.hf.engine",
    "support.layouts",
    *(("vlmpack.backends.mcore.engine",) if find_spec("megatron") else ()),
)
READY_SECONDS = 300


class EndedRanks(subprocess.CompletedProcess[str]):
    """Ranks that have ended.

    Attributes:
        codes: exit codes by rank, negative for a signal.
        said: by rank, its stderr.
    """

    codes: list[int]
    said: list[str]


class RankServer:
    """One server; requests one at a time."""

    def __init__(self, modules: tuple[str, ...] = IMPORTED, path: Sequence[Path] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.rank_server", *modules],
            cwd=ROOT,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests", ROOT, *path))),
                # Numpy's, torch's and Arrow's libraries start no thread where they are told so.
                "OMP_NUM_THREADS": "1",
                "JE_ARROW_MALLOC_CONF": "background_thread:false",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ready = False

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            AssertionError: the server ended, or cannot be forked.
        """
        stdin, stdout = _pipe(self.process.stdin), _pipe(self.process.stdout)
        try:
            if not self.ready:
                assert json.loads(stdout.readline() or "{}") == {"ready": True}, "no server"
                self.ready = True
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            answer = json.loads(stdout.readline() or '{"error": "the server has ended"}')
        except BaseException:  # the test's own timeout too: the next answer would be this one's
            self.close()
            raise
        assert "error" not in answer, answer["error"]
        return dict(answer)

    def close(self) -> None:
        """End it, and ranks that it has with it."""
        _pipe(self.process.stdin).close()
        self.process.wait()
        _pipe(self.process.stdout).close()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@cache
def _servers() -> dict[str, RankServer]:
    servers: dict[str, RankServer] = {}
    atexit.register(lambda: [server.close() for server in servers.values()])
    return servers


def shared_server() -> RankServer:
    """This test process's own, started on first use and again where it has ended."""
    servers = _servers()
    if "one" not in servers or servers["one"].process.poll() is not None:
        servers["one"] = RankServer()
    return servers["one"]


def run_ranks(
    command: Sequence[str | Path],
    processes: int,
    *,
    timeout: float | None = None,
    environment: dict[str, str] | None = None,
    server: RankServer | None = None,
) -> EndedRanks:
    """Run `python COMMAND` in each of some processes, in the repository's folder.

    Args:
        command: a script, or `-m` and a module; then its arguments.
        processes: the world size; torchrun's variables say so where it is more than one.
        timeout: seconds until all ranks are killed; by default a little less than the test has.
        environment: instead of this process's own.
        server: another one than this test process's.

    Returns:
        The exit code of the rank that failed first, or 0, and the streams of all ranks, one after
        the other; those of that one last.
    """
    timeout = of_a_launch() if timeout is None else timeout
    path, *arguments = map(str, command[1:] if command[0] == "-m" else command)
    ranks = range(processes)
    world = dict(os.environ if environment is None else environment)
    if processes > 1:
        world |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        request = {
            "processes": processes,
            "is_module": command[0] == "-m",
            "path": path,
            "arguments": arguments,
            "environment": world,
            "cwd": str(ROOT),
            "folder": folder,
            "timeout": timeout,
        }
        answer = (server or shared_server()).ask(request)
        out, err, stacks = (
            [Path(folder, f"{rank}.{stream}").read_text("utf-8", "replace") for rank in ranks]
            for stream in ("out", "err", "stack")
        )
    first, said = answer["first"], [*err]
    if first is not None:  # its words come last, where they are looked for
        err.append(f"\nrank {first} ended with {answer['codes'][first]}:\n{err.pop(first)}")
    if answer["timed_out"]:
        places = ["".join(stack.splitlines(True)[1:9]) for stack in stacks]
        err += [f"\nrank {rank} was in:\n{place}" for rank, place in enumerate(places)]
        err.append(f"\nkilled after {timeout} seconds")
    code = answer["codes"][first or 0]
    done = EndedRanks(command, code, "".join(out), "".join(err))
    done.codes, done.said = answer["codes"], said
    return done


def check_ranks(command: Sequence[str | Path], processes: int, **options: Any) -> None:
    """The same, of ranks that must not fail.

    Raises:
        AssertionError: one did; the message has the end of what the ranks wrote to stderr.
    """
    done = run_ranks(command, processes, **options)
    assert done.returncode == 0, done.stderr[-6000:] or done.returncode


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
