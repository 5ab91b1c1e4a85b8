"""`vlmpack plan --measure` beside the runs it predicts: python benchmarks/bench_measure.py [OUT]

Each recipe, its run shortened, is predicted, then run to its end (the whole run's seconds, of its
steps) and once for each choice (of its steps). A table; with OUT, JSON as well. Takes about half
an hour on two cores, which should have nothing else to do.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from models import ROOT

RECIPES = {
    "digits-demo": 120,
    "digits-padded": 80,
    "digits-lora": 120,
    "digits-qwen3_5": 60,
    "digits-tp2": 60,
    "text-sft": 120,
}
"""Steps of each."""
QUIET = ("logging.trackers=[]", "logging.progress=none")


def main() -> None:
    """Predict, run, print."""
    found = {name: of_recipe(name, steps) for name, steps in RECIPES.items()}
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


def of_recipe(name: str, steps: int) -> dict[str, Any]:
    """Predicted and taken seconds of a recipe and its choices."""
    with tempfile.TemporaryDirectory(prefix="vlmpack-bench-") as temporary:
        folder = Path(temporary)
        base = [f"recipes/{name}.yaml", f"training.max_steps={steps}", f"run_dir={folder}/run"]
        plan = folder / "plan.json"
        vlmpack("plan", *base, "--measure", "--measure-seconds", "6", "--json", str(plan))
        measured = json.loads(plan.read_text())["measured"]
        processes = measured["processes"]
        started = time.perf_counter()
        vlmpack("finetune", *base, *QUIET, processes=processes)
        wall = time.perf_counter() - started
        taken: dict[str, float] = {"": train_seconds(folder / "run")}
        for number, choice in enumerate(measured["choices"]):
            if choice["change"] and choice["speed"]:
                run = folder / str(number)
                alone = [*base[:2], f"run_dir={run}", choice["change"], "evaluation.generate=false"]
                vlmpack("finetune", *alone, *QUIET, processes=processes)
                taken[choice["change"]] = train_seconds(run)
    predicted = {
        one["change"]: one["training_seconds"] for one in measured["choices"] if one["speed"]
    }
    fastest, best_two = min(predicted, key=predicted.__getitem__), sorted(taken, key=taken.get)[:2]
    row = {
        "whole run, predicted over taken": measured["seconds"] / wall,
        "steps, predicted over taken": predicted[""] / taken[""],
        "seconds of the run": wall,
        "fastest predicted is of the best two": fastest in best_two,
        "predicted": predicted,
        "taken": taken,
    }
    print(name, json.dumps(row), flush=True)
    return row


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
