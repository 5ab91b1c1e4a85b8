"""This checkout against an earlier one: launch to first step, samples/s, seconds of a save.

    git worktree add ../before COMMIT
    python benchmarks/against.py ../before --rounds 5

Runs of the demo recipe alternate between the two, each in a process of its own that imports its
own checkout; ratios are medians over medians of one call. `cold` starts without an index, `warm`
with one and with all else that a first launch leaves behind.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
TIMED = HERE / "benchmarks" / "timed_run.py"
RECIPE = "recipes/digits-demo.yaml"
LAUNCH = {"training.max_steps": 1, "evaluation.generate": False, "checkpoint.interval_steps": None}
STEADY = LAUNCH | {"training.max_steps": 60, "checkpoint.interval_steps": 10}


def _run(checkout: Path, index: Path, overrides: dict[str, object]) -> dict[str, float]:
    """The figures of one process."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "figures.json"
        given = overrides | {"run_dir": f"{scratch}/run", "data.index_dir": str(index)}
        pairs = [f"{key}={json.dumps(value)}" for key, value in given.items()]
        environment = os.environ | {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(TIMED), str(out), RECIPE, *pairs]
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{checkout}: exit {done.returncode}\n{done.stderr[-3000:]}")
        return dict(json.loads(out.read_text()))


def _round(checkouts: dict[str, Path], index: Path, kind: str) -> dict[str, dict[str, float]]:
    """One run of each checkout."""
    found = {}
    for name, checkout in checkouts.items():
        folder = index / name
        if kind == "cold":
            folder = folder / f"cold-{time.monotonic_ns()}"
        overrides = STEADY if kind == "steady" else LAUNCH
        found[name] = _run(checkout, folder, overrides)
    return found


def against(before: Path, *, rounds: int) -> dict[str, object]:
    """Medians of both and their ratios, this checkout's over the earlier one's."""
    checkouts = {"before": before.resolve(), "now": HERE}
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as scratch:
        index = Path(scratch)
        _round(checkouts, index, "warm")  # compiles, indexes, fills the page cache
        for kind in ("warm", "cold", "steady"):
            taken = [_round(checkouts, index, kind) for _ in range(rounds)]
            for figure in taken[0]["now"]:
                if kind == "steady" and figure == "first_step_seconds":
                    continue
                medians = {
                    name: statistics.median(each[name][figure] for each in taken)
                    for name in checkouts
                }
                ratio = medians["now"] / medians["before"]
                results[f"{kind} {figure}"] = medians | {"ratio": ratio}
    return results


def main() -> None:
    """Print the figures, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="a checkout of the earlier commit")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each checkout and kind")
    parser.add_argument("--save", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    results = against(arguments.before, rounds=arguments.rounds)
    for name, figures in results.items():
        print(name, json.dumps(figures))
    if arguments.save:
        arguments.save.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
