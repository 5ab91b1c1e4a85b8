"""Guards a call into a program's own code: its exits, its forks, and its name for later messages.

    with calling("callback Print.on_step (callbacks[0])", fault):
        returned = callback.on_step(event)

`sys.exit` there is an error, since the ended run would look like a success. A forked child that
leaves the code is ended, since it would become a second trainer. `os._exit` and a crash leave no
time for a message. So the name of each call is written into a small file first, which every run
that Python ends removes. The next launch reads what is left.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from vlmpack.activity import ACTIVITY
from vlmpack.whole_file import regular_bytes
from vlmpack.words import raised

Fault = Callable[[BaseException], Exception]
"""Makes the error to raise for one of the program's code, or returns it unchanged."""

_PATTERN = "calling-*.json"


class Calls:
    """What is called now in this process, in the order in which it began; one file."""

    def __init__(self) -> None:
        self._now: list[str] = []
        self._path: Path | None = None
        self._descriptor: int | None = None
        self._written = 0

    @contextmanager
    def kept_in(self, folder: Path, rank: int) -> Iterator[None]:
        """Write calls into a folder, from the first one in the block on."""
        self._path = folder / _PATTERN.replace("*", str(rank))
        try:
            yield
        finally:
            path, self._path = self._path, None
            if self._descriptor is not None:
                os.close(self._descriptor)
                path.unlink(missing_ok=True)
            self._descriptor, self._written = None, 0

    def start(self, name: str) -> None:
        """A call begins."""
        self._now.append(name)
        self._write()

    def end(self, name: str) -> None:
        """It has come back."""
        self._now.remove(name)
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        with suppress(OSError):  # a full disk: what matters here is the call itself
            if self._descriptor is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
                self._descriptor = os.open(self._path, flags, 0o666)
            who = {"pid": os.getpid(), "host": socket.gethostname(), "step": ACTIVITY.step}
            text = json.dumps({**who, "calls": self._now}).encode()
            os.pwrite(self._descriptor, text.ljust(self._written), 0)
            self._written = max(self._written, len(text))


CALLS = Calls()
"""This process's."""


@contextmanager
def calling(name: str, fault: Fault) -> Iterator[None]:
    """Call a program's code in this block. `fault` makes the error for what it raises, `sys.exit`
    included, but is not called for Ctrl-C."""
    process = os.getpid()
    CALLS.start(name)
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if os.getpid() != process:
            _end_child(name, process, error)
        found = fault(error)
        if found is error:
            raise
        raise found from error
    finally:
        if os.getpid() != process:
            _end_child(name, process, sys.exception())
        CALLS.end(name)


def _end_child(name: str, parent: int, error: BaseException | None) -> NoReturn:
    """End a forked child here. One that left by `sys.exit` keeps its exit code."""
    code = 1
    if isinstance(error, SystemExit):
        with suppress(Exception):
            sys.stdout.flush()
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    else:
        outcome = "came back" if error is None else raised(error)
        said = (
            f"{name}: process {parent} was forked in it, and the child, process {os.getpid()}, "
            f"{outcome}. The child is ended here, as two processes would train in one run folder. "
            "Expected a child that ends itself, such as by os._exit\n"
        )
        with suppress(OSError):
            os.write(2, said.encode())
    os._exit(code & 0xFF)


def left_behind(folder: Path) -> list[Mapping[str, Any]]:
    """What ended processes were calling, or running ones are: entries with `pid`, `host`, `step`
    and `calls`."""
    calls: list[Mapping[str, Any]] = []
    for path in sorted(folder.glob(_PATTERN)):
        if path.is_symlink() or not path.is_file():
            continue
        with suppress(OSError, ValueError, RecursionError):
            entry = json.loads(regular_bytes(path)[:65536])
            if (
                isinstance(entry, dict)
                and isinstance(entry.get("calls"), list)
                and entry["calls"]
                and {type(entry.get("pid")), type(entry.get("step"))} == {int}
            ):
                calls.append(entry)
    return calls


def clear_left_behind(folder: Path) -> list[str]:
    """What the launch before was calling when it ended without a message, a line per process. Then
    clears it."""
    lines = [f"the launch before {words_of(entry)}" for entry in left_behind(folder)]
    for path in folder.glob(_PATTERN):
        with suppress(OSError):
            path.unlink()
    return lines


def words_of(entry: Mapping[str, Any]) -> str:
    """One entry in words, behind who it is."""
    inside = " and ".join(" ".join(str(call).split())[:200] for call in entry["calls"][:4])
    step = f"at step {entry['step']}" if entry["step"] else "before the first step"
    return (
        f"ended inside {inside} {step} (process {entry['pid']}) and said nothing: that code ended "
        "the process (os._exit, a crash), or it was killed there"
    )
