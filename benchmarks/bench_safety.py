"""What digests, checks and the watchdog cost a run: samples/s and seconds of a save.

Runs of the demo recipe, in turn with the checkout that VLMPACK_BEFORE names, if it does; each in a
process of its own that imports its own checkout. Ratios are of medians.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from models import ROOT

TIMED = ROOT / "benchmarks" / "timed_run.py"
RECIPE = "recipes/digits-demo.yaml"
RUN = {
    "training.max_steps": 60,
    "checkpoint.interval_steps": 10,
    "evaluation.generate": False,
    "evaluation.interval_steps": None,
}


def bench_safety(rounds: int) -> dict[str, object]:
    """Medians of each checkout, and this one's over the earlier one's."""
    checkouts = {"now": ROOT}
    if before := os.environ.get("VLMPACK_BEFORE"):
        checkouts["before"] = Path(before).resolve()
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory(prefix="vlmpack-bench-") as name:
        for number in range(rounds + 1):
            for tree, checkout in checkouts.items():
                figures = timed_run(checkout, Path(name) / f"index-{tree}")
                if number:  # the first one indexes, and fills the page cache
                    taken[tree].append(figures)
    medians = {
        (figure, tree): statistics.median(each[figure] for each in runs)
        for tree, runs in taken.items()
        for figure in runs[0]
    }
    found: dict[str, object] = {f"{f}, {tree}": value for (f, tree), value in medians.items()}
    if before:
        for figure in taken["now"][0]:
            ratio = medians[figure, "now"] / medians[figure, "before"]
            found[f"{figure}, now over before"] = ratio
    return found


def timed_run(checkout: Path, index: Path) -> dict[str, float]:
    """The figures of one process."""
    with tempfile.TemporaryDirectory(prefix="vlmpack-bench-") as scratch:
        out = Path(scratch) / "figures.json"
        given = RUN | {"run_dir": f"{scratch}/run", "data.index_dir": str(index)}
        pairs = [f"{key}={json.dumps(value)}" for key, value in given.items()]
        environment = os.environ | {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(TIMED), str(out), RECIPE, *pairs]
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{checkout} ended with {done.returncode}\n{done.stderr[-3000:]}")
        return dict(json.loads(out.read_text()))
