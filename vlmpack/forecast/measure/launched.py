"""A recipe's run as processes of their own, watched through its metrics.jsonl."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

from vlmpack.errors import VlmpackError
from vlmpack.training.metrics import read_rows
from vlmpack.training.run_dir import RunDir

Rows = list[dict[str, Any]]
POLL_SECONDS = 0.1
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
"""That would make the processes a part of the launch that this one may be a part of."""
MOST_WORDS = 300
"""Characters of what a process said that are told."""


class MeasuredRunError(VlmpackError):
    """The processes of a measured run failed.

    Args:
        said: their error, or the last that they said.
    """

    def __init__(self, said: str) -> None:
        self.said = said
        super().__init__(f"--measure: a run of the recipe's first steps failed: {said}")


def first_steps(
    recipe: str,
    run_dir: Path,
    processes: int,
    is_enough: Callable[[Sequence[Mapping[str, Any]]], bool],
) -> Rows:
    """The rows of a run's first steps. It is ended as soon as there are enough, without a
    checkpoint.

    Args:
        recipe: as YAML.
        run_dir: the recipe's own, which does not exist yet.
        processes: that run it.
        is_enough: whether the rows so far are.

    Raises:
        MeasuredRunError: it failed before.
    """
    metrics = RunDir(run_dir).metrics
    with _launched(recipe, run_dir, processes) as (process, said):
        while process.poll() is None:
            rows = _steps(metrics)
            if is_enough(rows):
                return rows
            time.sleep(POLL_SECONDS)
        if process.returncode:
            raise MeasuredRunError(_last_words(said))
    return _steps(metrics)


def whole_run(recipe: str, run_dir: Path, processes: int) -> float:
    """Take a run to its end.

    Args:
        recipe, run_dir, processes: as `first_steps`.

    Returns:
        Seconds from the start of its processes to their end.

    Raises:
        MeasuredRunError: it failed.
    """
    started = time.perf_counter()
    with _launched(recipe, run_dir, processes) as (process, said):
        if process.wait():
            raise MeasuredRunError(_last_words(said))
    return time.perf_counter() - started


@contextmanager
def _launched(
    recipe: str, folder: Path, processes: int
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
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
    with folder.with_name(f"{folder.name}.log").open("w+b") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        try:
            yield process, said
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, the launcher first so that it restarts nothing.
    torchrun starts its own in sessions of their own, which no signal to a group reaches."""
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
    """The rows of training steps; a line that is being written is none yet."""
    return [row for row in read_rows(metrics) if "num_slots" in row]


def _last_words(said: IO[bytes]) -> str:
    """The error that the processes told, or their last line."""
    said.seek(0)
    lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
    last = lines[-1:] or ["its processes ended without a word"]
    return (errors or last)[0].strip()[:MOST_WORDS]
