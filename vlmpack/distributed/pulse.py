"""What each rank is doing, shared with the others through the launcher's store.

Every rank writes one small entry four times in `seconds`; the first few ranks read all entries
twice as often. An entry that no longer changes belongs to a stopped process or a lost machine.
Store calls have their own thread, since they block for ever when the store's process is stopped.
A blocked call is reported as well.

A killed process writes nothing. The others see a closed connection, in tracebacks that name no
rank; `words_of_lost` says who is gone, and where.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from vlmpack.activity import Activity
from vlmpack.distributed.ranks import Ranks
from vlmpack.watchdog import LOOKS

LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exiting prematurely",  # NCCL's
)
"""Messages of torch's backends about a lost connection, without timeouts: their tracebacks already
name the place.
"""


def lost_connection(error: BaseException) -> str | None:
    """The words of a collective's error about a lost process; None for any other error."""
    if not isinstance(error, RuntimeError):
        return None
    return next((words for words in LOST if words in str(error)), None)


def words_of_lost(words: str, *, step: int, phase: str, size: int, ended: Sequence[str]) -> str:
    """The last line of a process that lost another one; step 0 is before the first step."""
    where = f"step {step}, {phase}" if step else phase
    known = f": {'; '.join(ended)}" if ended else ""
    return (
        f"lost one of the {size} processes in {where} ({words}){known}. The first that ended has "
        "the cause in its last words. If it was killed, the launcher gives its exit code or "
        "signal. The same command resumes from the last checkpoint"
    )


def has_ended(pid: int) -> bool:
    """Whether a process of this machine is gone; False if the kernel does not tell."""
    if not Path("/proc/self/stat").exists():
        return False
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return text.rpartition(")")[2].split()[0] in "ZX"


KEY = "vlmpack/pulse"
SPEAKERS = 3
"""Ranks that read the others' entries; the first of them that lives speaks."""
MOST_NAMED = 4
STORE_SECONDS = 30.0
STACK_FRAMES = 8
LOOKS_PER_ENTRY = 2


@dataclass
class Pulse:
    """This rank's entry and those of the others; a context manager.

    Args:
        seconds: the longest silence.
        store: a client of its own, since a waiting call blocks other calls of its client.
    """

    activity: Activity
    _: KW_ONLY
    rank: int
    world_size: int
    seconds: float
    store: Any

    def __post_init__(self) -> None:
        self._called: float | None = None
        self._entries: dict[int, Mapping[str, Any]] = {}
        self._changed: dict[int, float] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vlmpack-pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join(timeout=2.0)  # a call to a dead store may never come back

    def speaks(self) -> bool:
        """Whether this rank reports: it is the first one that lives."""
        if self.rank >= SPEAKERS:
            return False
        return self.store_silent() is not None or all(
            self._is_silent(rank) for rank in range(self.rank)
        )

    def lines(self) -> Sequence[str]:
        """The ranks that the others wait for, as far as known."""
        silent_store = self.store_silent()
        if silent_store is not None:
            return [
                f"the launcher's store has not answered for {silent_store:.0f} s, so nothing is "
                "known of other ranks. The process that keeps it (torchrun's on the first "
                "machine, or rank 0) is stopped or cannot be reached"
            ]
        entries = dict(self._entries)
        missing = [r for r in range(self.world_size) if r not in entries and r != self.rank]
        gone = [rank for rank in sorted(entries) if self._is_silent(rank)]
        lines = [f"rank {rank} has not started to report" for rank in missing]
        lines += [self._gone(rank, entries[rank]) for rank in gone]
        if not lines:
            lines = [self._behind(rank, entries[rank]) for rank in _behind(entries, self.rank)]
        if not lines:
            lines = [f"all {self.world_size} ranks stand there"]
        more = len(lines) - MOST_NAMED
        return lines[:MOST_NAMED] + ([f"and {more} more ranks"] if more > 0 else [])

    def ended(self) -> list[str]:
        """Ranks of this machine whose process is gone."""
        return [
            f"{_who(rank, entry)} has ended, last heard of {_step(entry)}, {entry['phase']}"
            for rank, entry in sorted(dict(self._entries).items())
            if entry["host"] == socket.gethostname() and has_ended(entry["pid"])
        ][:MOST_NAMED]

    def store_silent(self) -> float | None:
        """For how long a store call has been blocked; None if none is."""
        called = self._called
        waited = 0.0 if called is None else time.monotonic() - called
        return waited if waited > 0.45 * self.seconds else None

    def _is_silent(self, rank: int) -> bool:
        """Whether a rank's entry has not changed for two of its turns."""
        changed = self._changed.get(rank)
        return changed is not None and time.monotonic() - changed > 0.45 * self.seconds

    def _gone(self, rank: int, entry: Mapping[str, Any]) -> str:
        quiet = time.monotonic() - self._changed[rank]
        return (
            f"{_who(rank, entry)} has given no sign of life for {quiet:.0f} s. It is stopped, or "
            f"its machine is gone or out of reach. It was last heard of {_where(entry)}"
        )

    def _behind(self, rank: int, entry: Mapping[str, Any]) -> str:
        stack = f"; its main thread stands at\n{entry['stack']}" if entry.get("stack") else ""
        return f"{_who(rank, entry)} stands {_where(entry)}, for {entry['quiet']:.0f} s{stack}"

    def _run(self) -> None:
        turn = 0
        try:
            while True:
                self._called = time.monotonic()
                if turn % LOOKS_PER_ENTRY == 0:
                    self._write(turn)
                if self.rank < SPEAKERS:
                    self._look()
                self._called = None
                turn += 1
                if self._stopped.wait(self.seconds / LOOKS / LOOKS_PER_ENTRY):
                    return
        except RuntimeError:  # the store is gone: the run ends, or its first machine has
            return

    def _write(self, turn: int) -> None:
        activity = self.activity
        quiet = time.monotonic() - activity.since
        entry = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "step": activity.step,
            "phase": activity.phase,
            "samples": activity.last_samples(),
            "waits": activity.waits(),
            "quiet": quiet,
            "ticks": turn,
            "stack": activity.stack(STACK_FRAMES) if quiet > self.seconds / LOOKS else "",
        }
        self.store.set(f"{KEY}/{self.rank}", json.dumps(entry))

    def _look(self) -> None:
        keys = {rank: f"{KEY}/{rank}" for rank in range(self.world_size) if rank != self.rank}
        if not self.store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        values = self.store.multi_get(list(keys.values())) if keys else []
        now = time.monotonic()
        for rank, value in zip(keys, values, strict=True):
            entry = json.loads(value)
            before = self._entries.get(rank)
            if before is None or before["ticks"] != entry["ticks"]:
                self._changed[rank] = now
            self._entries[rank] = entry


def pulse_store(ranks: Ranks) -> Any:
    """A store client with a prefix of its own for this start; None without a store. Collective."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    client = TCPStore(
        store.host,
        store.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_SECONDS),
    )
    return PrefixStore(f"{KEY}/{ranks.broadcast_object(uuid4().hex)}", client)


def _behind(entries: Mapping[int, Mapping[str, Any]], own: int) -> list[int]:
    """The ranks at the earliest step; if all are at one step, those in an unusual phase."""
    others = {rank: entry for rank, entry in sorted(entries.items()) if rank != own}
    first = min((entry["step"] for entry in others.values()), default=0)
    late = [rank for rank, entry in others.items() if entry["step"] == first]
    if len(late) < len(others):
        return late
    # One that waits for a store has the phase of those that wait for it to have read.
    places = {rank: (entry["phase"], *entry["waits"]) for rank, entry in others.items()}
    usual = max(places.values(), key=[*places.values()].count, default=())
    unusual = [rank for rank in late if places[rank] != usual]
    return unusual or late


def _who(rank: int, entry: Mapping[str, Any]) -> str:
    return f"rank {rank} (process {entry['pid']} on {entry['host']})"


def _where(entry: Mapping[str, Any]) -> str:
    waits = "".join(f", {wait}" for wait in entry["waits"])
    is_known = entry["step"] or entry["samples"] != "none"
    samples = f", last samples: {entry['samples']}" if is_known else ""
    return f"{_step(entry)}, {entry['phase']}{waits}{samples}"


def _step(entry: Mapping[str, Any]) -> str:
    """The step of a rank; 0 before its first step, also after a resume."""
    return f"at step {entry['step']}" if entry["step"] else "before its first step"
