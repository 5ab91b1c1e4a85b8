"""Seconds from a launch to the first step's row in metrics.jsonl.

- `launch`: the demo, one step, with its index there and without; on two processes of torchrun; and
  its one process by phase, in launches of their own (`launch_phases.py`);
- `many shards`: one text shard and two thousand, with their index there.

With `--before` another checkout runs in turn with this one, on the same interpreter. Ratios are of
medians.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from models import ROOT

RECIPE = "recipes/digits-demo.yaml"
ONE_STEP = ("training.max_steps=1", "evaluation.generate=false")
SHARDS = 2000
ON_TEXT = (
    "data.validation=null",
    "data.test=null",
    "evaluation.interval_steps=null",
    "data.shuffle=global",
    "training.micro_batch_size=2",
    "training.global_batch_size=2",
)


def bench_launch(rounds: int, before: str | None) -> dict[str, object]:
    """Figures of the demo.

    Args:
        rounds: timed launches of each kind.
        before: the other checkout; None for this one alone.
    """
    kinds = {
        "warm": ONE_STEP,
        "cold": ONE_STEP,
        "two processes": (*ONE_STEP, "training.micro_batch_size=8"),
    }
    with tempfile.TemporaryDirectory(prefix="vlmpack-bench-") as name:
        return _medians(kinds, Path(name), rounds, before, by_phase=True)


def bench_many_shards(rounds: int, before: str | None) -> dict[str, object]:
    """Figures of text shards."""
    with tempfile.TemporaryDirectory(prefix="vlmpack-bench-") as name:
        folder = Path(name)
        write_text_shards(folder / "shards", SHARDS)
        kinds = {
            "1 shard": (*ONE_STEP, *ON_TEXT, f"data.train={folder}/shards/s-0000.tar"),
            f"{SHARDS} shards": (*ONE_STEP, *ON_TEXT, f"data.train={folder}/shards/*.tar"),
        }
        figures = _medians(kinds, folder, rounds, before)
    one, many = (figures[f"{kind}, now, seconds"] for kind in kinds)
    return {**figures, "many over one, now": many / one}


def _medians(
    kinds: dict[str, tuple[str, ...]],
    folder: Path,
    rounds: int,
    before: str | None,
    *,
    by_phase: bool = False,
) -> dict[str, float]:
    trees = {"now": ROOT, **({"before": Path(before).resolve()} if before else {})}
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):  # the first makes the index, and is not counted
        for kind, settings in kinds.items():
            for tree, root in trees.items():
                index = folder / f"{kind}-{tree}{number if kind == 'cold' else ''}"
                own = (*settings, f"data.index_dir={index}", f"run_dir={folder}/run")
                seconds = first_step(root, own, processes=2 if kind == "two processes" else 1)
                if number:
                    found.setdefault(f"{kind}, {tree}", []).append(seconds)
        for tree, root in trees.items() if by_phase and number else ():
            own = (*ONE_STEP, f"data.index_dir={folder}/warm-{tree}", f"run_dir={folder}/run")
            for phase, seconds in seconds_by_phase(root, own, folder / "phases").items():
                found.setdefault(f"{phase}, {tree}", []).append(seconds)
    medians = {key: statistics.median(values) for key, values in found.items()}
    figures = {f"{key}, seconds": value for key, value in medians.items()}
    for kind in kinds if before else ():
        ratio = medians[f"{kind}, now"] / medians[f"{kind}, before"]
        figures[f"{kind}, now over before"] = ratio
    return figures


def first_step(root: Path, settings: tuple[str, ...], *, processes: int) -> float:
    """Seconds from the launch to the first row; the run goes on to its end."""
    launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m")
    head = ["-m", *(launcher if processes > 1 else ()), "vlmpack"]
    return _launched([*head, "finetune", RECIPE, *settings], root)


def seconds_by_phase(root: Path, settings: tuple[str, ...], file: Path) -> dict[str, float]:
    """Phase -> seconds of one process."""
    program = str(Path(__file__).with_name("launch_phases.py"))
    _launched([program, "finetune", RECIPE, *settings], root, VLMPACK_PHASES=str(file))
    return json.loads(file.read_text())


def _launched(arguments: list[str], root: Path, **environment: str) -> float:
    """Seconds to the first row of a run, whose folder is the last argument."""
    run = Path(arguments[-1].partition("=")[2])
    shutil.rmtree(run, ignore_errors=True)
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=root,
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    rows, seconds = run / "metrics.jsonl", 0.0
    while process.poll() is None:
        if not seconds and rows.is_file() and rows.stat().st_size:
            seconds = time.perf_counter() - start
        time.sleep(0.005)
    if process.returncode or not seconds:
        raise RuntimeError(f"{' '.join(arguments)} ended with status {process.returncode}")
    return seconds


def write_text_shards(folder: Path, count: int) -> None:
    """Shards of two short conversations each."""
    folder.mkdir()
    for shard in range(count):
        with tarfile.open(folder / f"s-{shard:04d}.tar", "w") as tar:
            for number in range(2):
                question, answer = f"What is {shard} and {number}?", f"{shard + number}."
                turns = (("user", question), ("assistant", answer))
                messages = [
                    {"role": role, "content": [{"type": "text", "text": text}]}
                    for role, text in turns
                ]
                data = json.dumps({"messages": messages}).encode()
                entry = tarfile.TarInfo(f"{shard:04d}-{number}.json")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
