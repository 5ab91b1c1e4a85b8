"""`vlmpack plan --measure` beside the runs it predicts: bench_measure.py OUT [NAME...]

Each recipe (or those named), its run shortened, is predicted and run to its end in turns, and run
once for each choice. JSON in OUT, a recipe at a time, beside what it has of others. Takes an hour
on two cores, which should have nothing else to do.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from models import ROOT

RECIPES = {
    "digits-demo": 120,
    "digits-padded": 50,
    "digits-lora": 80,
    "digits-qwen3_5": 40,
    "digits-tp2": 40,
    "text-sft": 100,
}
"""Steps of each."""
ROUNDS = 2
"""Predictions, and runs, one after the other: a shared machine is not always as fast."""
QUIET = ("logging.trackers=[]", "logging.progress=none")


def main() -> None:
    """Predict, run, print."""
    out = Path(sys.argv[1])
    found = json.loads(out.read_text()) if out.is_file() else {}
    for name in sys.argv[2:] or RECIPES:
        found[name] = of_recipe(name, RECIPES[name])
        out.write_text(json.dumps(found, indent=1) + "\n")


def of_recipe(name: str, steps: int) -> dict[str, Any]:
    """Predicted and taken seconds of a recipe and its choices."""
    with tempfile.TemporaryDirectory(prefix="vlmpack-bench-") as temporary:
        folder = Path(temporary)
        base = [f"recipes/{name}.yaml", f"training.max_steps={steps}"]
        measured = measure(folder / "plan.json", base)
        predictions, walls, took = [measured], [], []
        for number in range(ROUNDS):
            if number:
                predictions.append(measure(folder / "plan.json", base, "--no-choices"))
            started = time.perf_counter()
            run = folder / f"run-{number}"
            vlmpack("finetune", *base, f"run_dir={run}", *QUIET, processes=measured["processes"])
            walls.append(time.perf_counter() - started)
            took.append(train_seconds(run))
        taken = {"": fmean(took)}
        for number, choice in enumerate(measured["choices"]):
            if choice["change"] and choice["speed"]:
                run = folder / str(number)
                alone = [*base, f"run_dir={run}", choice["change"], "evaluation.generate=false"]
                vlmpack("finetune", *alone, *QUIET, processes=measured["processes"])
                taken[choice["change"]] = train_seconds(run)
    predicted = {
        one["change"]: one["training_seconds"] for one in measured["choices"] if one["speed"]
    }
    fastest, best_two = min(predicted, key=predicted.__getitem__), sorted(taken, key=taken.get)[:2]
    row = {
        "steps": steps,
        "whole run, predicted over taken": fmean(p["seconds"] for p in predictions) / fmean(walls),
        "steps, predicted over taken": fmean(map(steps_of, predictions)) / fmean(took),
        "seconds of each run": walls,
        "seconds of its steps": took,
        "fastest predicted is of the best two": fastest in best_two,
        "predicted": predicted,
        "taken": taken,
    }
    print(name, json.dumps(row), flush=True)
    return row


def measure(out: Path, base: list[str], *options: str) -> dict[str, Any]:
    """What `plan --measure` predicts."""
    where = f"run_dir={out.with_name('run')}"
    vlmpack(
        "plan", *base, where, "--measure", "--measure-seconds", "6", *options, "--json", str(out)
    )
    return dict(json.loads(out.read_text())["measured"])


def steps_of(measured: dict[str, Any]) -> float:
    """Predicted seconds of the recipe's own steps."""
    (own,) = [one["training_seconds"] for one in measured["choices"] if not one["change"]]
    return float(own)


def train_seconds(run_dir: Path) -> float:
    """Of all steps of a run."""
    return float(json.loads((run_dir / "result.json").read_text())["train_seconds"])


def vlmpack(command: str, *arguments: str, processes: int = 1) -> None:
    """Run the command line."""
    launcher = [sys.executable, "-m"]
    if processes > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        launcher += ["-m"]
    whole = [*launcher, "vlmpack", command, *arguments]
    subprocess.run(whole, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
