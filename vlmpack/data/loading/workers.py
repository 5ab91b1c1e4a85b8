"""The loader's processes: how they start, how their end is noticed, how they are ended.

They are children of the fork server, so no signal reports their end to the trainer. Their sentinels
do. A process that the kernel kills may leave half a message and a locked pipe. Whoever reads that
message waits for ever, past every timeout. So:

    next_item     asks the DataLoader in short steps; after each, torch looks at the sentinels
    WorkerWatch   a thread that also looks; where a reader is stuck, it ends the other processes and
                  closes the pipe, so that the reader meets its end
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from vlmpack.activity import ACTIVITY
from vlmpack.data.forkserver import end_with
from vlmpack.errors import DataError, transport_error
from vlmpack.terminal import say_printable
from vlmpack.watchdog import Watchdog

LOOK_SECONDS = 1.0
"""How often a waiting trainer looks whether its workers live."""
STUCK_SECONDS = 5.0
"""How long a trainer may take to notice a dead worker before its read is cut."""
TIMED_OUT = "DataLoader timed out"
ENDED = "DataLoader worker (pid"


def start_worker(worker: int, *, trainer: int, watch_seconds: float = 60.0) -> None:
    """The first thing a worker runs."""
    torch.set_num_threads(1)
    end_with(trainer)
    who = f"loader process {worker} (process {os.getpid()})"
    # It lives as long as the worker, whose threads end with it.
    Watchdog(ACTIVITY, watch_seconds, who=who, say=say_printable).__enter__()


class WorkerWatch:
    """Ends the workers, and any read that waits for the rest of a dead worker's message. Without
    workers it watches nothing."""

    def __init__(self, batches: Any, num_workers: int) -> None:
        self._batches = batches
        self.workers: tuple[BaseProcess, ...] = tuple(batches._workers) if num_workers else ()
        self._first: tuple[BaseProcess, ...] = ()
        self._stopped, self._stop = connection.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._watch, name="vlmpack-workers", daemon=True)
        if self.workers:
            self._thread.start()
        # Python ends what is left of its children by SIGTERM, which is blocked in these, and waits:
        # a run that ends by an error would hang there. This comes before.
        self._at_exit = util.Finalize(self, _kill, args=(self.workers,), exitpriority=10)

    def close(self) -> None:
        """Ends the workers now, not whenever the garbage collector comes by."""
        if self.workers:
            self._batches._shutdown_workers()
        self._stop.close()
        if self.workers:
            self._thread.join()
        self._stopped.close()
        self._at_exit()

    def _watch(self) -> None:
        # Only waits: the exit code lies in the sentinel once, and the training thread reads it.
        sentinels = [worker.sentinel for worker in self.workers]
        ended = connection.wait([*sentinels, self._stopped])
        if self._stopped in ended or connection.wait([self._stopped], STUCK_SECONDS):
            return
        self._first = tuple(worker for worker in self.workers if worker.sentinel in ended)
        for worker in self.workers:
            worker.kill()
        self._batches._worker_result_queue._writer.close()

    def awaited(self) -> tuple[int, str] | None:
        """The number of the next request and its worker in words; None without workers. For any
        thread."""
        if not self.workers:
            return None
        number = self._batches._rcvd_idx
        # Who has a request stands first; the entry goes when its batch is taken.
        worker = self._batches._task_info.get(number, (None,))[0]
        if worker is None:
            return None
        process = self.workers[worker]
        state = state_of(process.pid)
        return number, f"loader process {worker} (process {process.pid}{state and ', ' + state})"

    def dead(self, seconds: float = 0.0) -> list[str]:
        """Workers that ended within `seconds`, in words. For the training thread alone."""
        if self.workers and all(worker.exitcode is None for worker in self.workers):
            connection.wait([worker.sentinel for worker in self.workers], seconds)
        return [
            f"worker {number} (process {worker.pid}) {_how(worker.exitcode)}"
            for number, worker in enumerate(self.workers)
            if worker.exitcode is not None and worker in (self._first or self.workers)
        ]

    def kill(self) -> None:
        """Ends them at once; SIGTERM is blocked in them."""
        _kill(self.workers)


def _kill(workers: Sequence[BaseProcess]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.kill()


def _how(exitcode: int) -> str:
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    try:
        return f"was ended by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was ended by signal {-exitcode}"


_STATES = {
    "T": "stopped by a signal (SIGSTOP, or a debugger)",
    "t": "stopped by a debugger",
    "Z": "ended",
    "D": "waiting for a disk or a networked file system",
    "R": "computing",
    "S": "waiting",
}


def state_of(pid: int | None) -> str:
    """What the kernel says of a process, in words; nothing where it does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return _STATES.get(text.rpartition(")")[2].split()[0], "")


def next_item(
    batches: Iterator[Any],
    watch: WorkerWatch,
    timeout_seconds: float,
    waits_for: Callable[[], str | None] = lambda: None,
) -> Any:
    """The next item of the DataLoader's iterator, which has a timeout of `LOOK_SECONDS`.

    Raises:
        StopIteration: there is no more.
        DataError: class `transport`: a worker has died, or none answered within the timeout.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return next(batches)
        except (RuntimeError, OSError, EOFError) as error:
            if not watch.workers:
                raise
            text = str(error)
            if text.startswith(TIMED_OUT):
                if time.monotonic() < deadline:
                    continue
                awaited = waits_for()
                watch.kill()
                raise transport_error(
                    f"no batch came from {len(watch.workers)} workers within "
                    f"{timeout_seconds:.0f} s; the storage is too slow, or a worker hangs"
                    + (f": {awaited}" if awaited is not None else "")
                ) from error
            # A batch whose process died before its tensors were fetched: a lost connection.
            dead = watch.dead(LOOK_SECONDS if _may_be_death(error) else 0.0)
            if dead and _may_be_death(error):
                awaited = waits_for()
                watch.kill()
                raise _ended(dead, awaited) from error
            raise  # a bug inside a worker stays what it was


def _may_be_death(error: Exception) -> bool:
    return str(error).startswith(ENDED) or not isinstance(error, RuntimeError)


def _ended(dead: Sequence[str], awaited: str | None = None) -> DataError:
    if "with exit code" in dead[0]:
        at = f" ({awaited})" if awaited is not None else ""
        return transport_error(
            f"a loader process ended by itself: {'; '.join(dead)}{at}. Code that it ran has ended "
            "the process, such as by os._exit. A source or function of the program must return, "
            "or raise an error"
        )
    why = "Where nobody did that, the machine's memory ran out: " if "SIGKILL" in dead[0] else ""
    return transport_error(
        f"a loader process ended: {'; '.join(dead)}. {why}{'lower' if why else 'Lower'} "
        "data.num_workers or data.prefetch_batches if memory is short"
    )
