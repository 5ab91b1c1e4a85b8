"""Seconds from a launch to the first step's row in metrics.jsonl.

- the demo, one step, with its index there and without;
- text shards, one and two thousand, with their index there, told to stop after a step.

Where VLMPACK_BEFORE names a checkout of another version with an interpreter in .venv, the two run
in turn; ratios are of medians.
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


def bench_launch(rounds: int) -> dict[str, object]:
    """All figures of one run."""
    before = os.environ.get("VLMPACK_BEFORE")
    trees = {"now": (Path(sys.executable), ROOT)}
    if before:
        trees["before"] = (Path(before) / ".venv/bin/python", Path(before))
    with tempfile.TemporaryDirectory(prefix="vlmpack-bench-") as name:
        folder = Path(name)
        write_text_shards(folder / "shards", SHARDS)
        kinds = {
            "demo, warm": ONE_STEP,
            "demo, cold": ONE_STEP,
            "1 shard, warm": (*ONE_STEP, *ON_TEXT, f"data.train={folder}/shards/s-0000.tar"),
            f"{SHARDS} shards, warm": (*ONE_STEP, *ON_TEXT, f"data.train={folder}/shards/*.tar"),
        }
        found: dict[tuple[str, str], list[float]] = {}
        for number in range(min(rounds, 5) + 1):
            for kind, settings in kinds.items():
                for tree, (python, root) in trees.items():
                    index = folder / f"index-{tree}-{kind.split()[0]}"
                    if kind.endswith("cold"):
                        index = folder / f"cold-{tree}-{number}"
                    own = (*settings, f"data.index_dir={index}", f"run_dir={folder}/run")
                    seconds = first_step(python, root, own, folder / "run")
                    if number:
                        found.setdefault((kind, tree), []).append(seconds)
    return _figures({key: statistics.median(values) for key, values in found.items()}, list(kinds))


def _figures(medians: dict[tuple[str, str], float], kinds: list[str]) -> dict[str, object]:
    figures: dict[str, object] = {f"{k}, {t}, seconds": v for (k, t), v in medians.items()}
    for kind in kinds:
        if (kind, "before") in medians:
            figures[f"{kind}, now over before"] = medians[kind, "now"] / medians[kind, "before"]
    for tree in {tree for _, tree in medians}:
        one, many = (medians[kind, tree] for kind in kinds[2:])
        figures[f"{SHARDS} shards over 1, {tree}"] = many / one
    return figures


def first_step(python: Path, root: Path, settings: tuple[str, ...], run: Path) -> float:
    """Seconds from the launch to the first row; the run goes on to its end."""
    shutil.rmtree(run, ignore_errors=True)
    command = [str(python), "-m", "vlmpack", "finetune", RECIPE, *settings]
    start = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    rows, seconds = run / "metrics.jsonl", 0.0
    while process.poll() is None:
        if not seconds and rows.is_file() and rows.stat().st_size:
            seconds = time.perf_counter() - start
        time.sleep(0.005)
    if process.returncode or not seconds:
        raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}")
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
