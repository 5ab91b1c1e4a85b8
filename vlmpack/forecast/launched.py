"""A recipe's run as processes of their own, watched through its metrics.jsonl, and its speed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from math import ceil
from pathlib import Path
from typing import Any

import psutil

from vlmpack.errors import VlmpackError
from vlmpack.forecast.figures import StepSpeed
from vlmpack.recipe.data import DataSection
from vlmpack.training.metrics import read_rows
from vlmpack.training.run_dir import RunDir
from vlmpack.whole_file import open_regular, regular_bytes

Rows = list[dict[str, Any]]
POLL_SECONDS = 0.1
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
"""That would make the processes a part of the launch that this one may be a part of."""
_ERROR = re.compile(r"(\[rank \d+\] )?error: (?!the same as rank)")
MOST_WORDS = 2000
"""Longest quoted output of a process, in characters."""
SILENT = "no progress for "
"""The start of a message about a process that stands still."""

Tell = Callable[[str], None]
"""Told what is waited for, a line each time."""


class MeasuredRunError(VlmpackError):
    """The processes of a measured run failed."""

    def __init__(self, said: str, log: Path | None = None) -> None:
        self.said, self.log = said, log
        super().__init__(f"--measure: a run of the recipe's first steps failed: {said}")


def first_steps(
    recipe: str,
    run_dir: Path,
    processes: int,
    is_enough: Callable[[Sequence[Mapping[str, Any]]], bool],
    tell: Tell,
) -> Rows:
    """The rows of a run's first steps. It is ended as soon as there are enough, without a
    checkpoint.

    Args:
        recipe: as YAML.
        run_dir: the recipe's own, which does not exist yet.

    Raises:
        MeasuredRunError: it failed before.
    """
    metrics = RunDir(run_dir).metrics
    with _launched(recipe, run_dir, processes) as launched:
        while launched.process.poll() is None:
            rows = _steps(metrics)
            if is_enough(rows):
                return rows
            launched.pass_on(tell)
            time.sleep(POLL_SECONDS)
        launched.raise_failure()
    return _steps(metrics)


def whole_run(recipe: str, run_dir: Path, processes: int, tell: Tell) -> float:
    """Take a run to its end.

    Returns:
        Seconds from the start of its processes to their end.

    Raises:
        MeasuredRunError: it failed.
    """
    started = time.perf_counter()
    with _launched(recipe, run_dir, processes) as launched:
        while launched.process.poll() is None:
            launched.pass_on(tell)
            time.sleep(POLL_SECONDS)
        launched.raise_failure()
    return time.perf_counter() - started


@dataclass
class _Launched:
    """Processes, and the file of what they say."""

    process: subprocess.Popen[bytes]
    log: Path
    num_read: int = 0

    def pass_on(self, tell: Tell) -> None:
        """Report processes that stand still."""
        with open_regular(self.log) as said:
            said.seek(self.num_read)
            whole, end, _ = said.read().rpartition(b"\n")
        self.num_read += len(whole) + len(end)
        for line in whole.decode(errors="replace").splitlines():
            if line.lstrip().startswith(SILENT):
                tell(line.strip())

    def raise_failure(self) -> None:
        if self.process.returncode:
            raise MeasuredRunError(last_words(regular_bytes(self.log)), self.log)


@contextmanager
def _launched(recipe: str, folder: Path, processes: int) -> Iterator[_Launched]:
    """The processes, ended with all that they started when the block is left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_name(f"{folder.name}.yaml")
    file.write_text(recipe, encoding="utf-8")
    command = [sys.executable, "-m"]
    if processes > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += ["-m"]
    command += ["vlmpack", "finetune", str(file)]
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    log = folder.with_name(f"{folder.name}.log")
    with log.open("wb") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        try:
            yield _Launched(process, log)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, the launcher first, so that it restarts nothing."""
    try:
        all_of_it = [psutil.Process(process.pid)]
        all_of_it += all_of_it[0].children(recursive=True)
    except psutil.NoSuchProcess:
        all_of_it = []
    for one in all_of_it:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(all_of_it[1:], timeout=10)
    process.wait()


def _steps(metrics: Path) -> Rows:
    """The rows of training steps; a line that is still being written is left out."""
    return [row for row in read_rows(metrics) if "num_slots" in row]


def last_words(said: bytes) -> str:
    """The last error of the processes with its lines, or their last line.

    Tracebacks of Python and torchrun are left out.
    """
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    starts = [n for n, line in enumerate(lines) if _ERROR.match(line)]
    if not starts:
        return (lines[-1:] or ["its processes ended without a word"])[0].strip()[:MOST_WORDS]
    first = lines[starts[-1]].partition("error: ")[2]
    rest = takewhile(lambda line: line.startswith(" "), lines[starts[-1] + 1 :])
    return "\n".join([first, *rest]).strip()[:MOST_WORDS]


LEAST_STEPS = 8
"""Measured at least, where the run has so many."""


def steps_ahead(data: DataSection, micro_batches: float) -> int:
    """Steps to skip: the first, which warms up, and those whose data were read in advance."""
    read = data.workers * data.prefetch_batches + 1
    return 2 + ceil(read / max(1.0, micro_batches))


def is_enough(rows: Sequence[Mapping[str, Any]], ahead: int, seconds: float) -> bool:
    """Whether enough steps and seconds after the first ones have been measured."""
    measured = rows[ahead:]
    return len(measured) >= LEAST_STEPS and sum(row["seconds"] for row in measured) >= seconds


def speed_of(rows: Sequence[Mapping[str, Any]], ahead: int) -> StepSpeed | None:
    """The mean step after the first `ahead`, or of a short run's last half; None without rows."""
    measured = rows[ahead:] or rows[len(rows) // 2 :]
    if not measured:
        return None
    means = {
        name: sum(float(row[column]) for row in measured) / len(measured)
        for name, column in _AMOUNTS.items()
    }
    return StepSpeed(measured_steps=len(measured), **means)


_AMOUNTS = {
    "seconds": "seconds",
    "data_wait_seconds": "data_wait_seconds",
    "slots": "num_slots",
    "tokens": "num_tokens",
}
"""Amounts of a step -> their columns in metrics.jsonl."""


def scaled(speed: StepSpeed, factor: float) -> StepSpeed:
    """The speed of a step with `factor` times the work."""
    amounts: dict[str, Any] = {name: getattr(speed, name) * factor for name in _AMOUNTS}
    return replace(speed, **amounts)


def together(speeds: Sequence[StepSpeed]) -> StepSpeed:
    """The mean step of measurements of the same setting, each with its number of steps."""
    steps = sum(speed.measured_steps for speed in speeds)
    means = {
        name: sum(speed.measured_steps * float(getattr(speed, name)) for speed in speeds) / steps
        for name in _AMOUNTS
    }
    return StepSpeed(measured_steps=steps, **means)


def per_token(speed: StepSpeed) -> float:
    """Seconds of a real token, of which every setting trains the same."""
    return speed.seconds / max(1.0, speed.tokens)


def spread_of(speeds: Iterable[Sequence[StepSpeed]]) -> float | None:
    """The largest relative difference between measurements of one setting; None without two."""
    spreads = []
    for of_one in speeds:
        each = [per_token(speed) for speed in of_one]
        if len(each) > 1:
            spreads.append(max(each) / max(1e-12, min(each)) - 1)
    return max(spreads, default=None)
