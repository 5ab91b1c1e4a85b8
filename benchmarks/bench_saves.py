"""What saves and what watches over a run cost the training thread, as shares of one run.

    python benchmarks/bench_saves.py watched     the demo on two processes (gloo), 1,000 steps, a
                                                 save every 250, replicas compared before each, a
                                                 sentinel every 500 steps, steps that can be skipped
    python benchmarks/bench_saves.py waits       one process with about 1 GB of weights and moments,
                                                 saved in the background every 50 steps

Each span is taken on the training thread, wall and CPU, inside the calls themselves. A share is the
spans' sum over that of the steps, CPU over CPU and wall over wall.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models import ROOT, write_wide_model

STEPS = {"watched": 1000, "waits": 60}
WIDTH, LAYERS = 768, 12
"""84 million parameters: 1.0 GB with both moments in float32."""
ALWAYS = {
    "evaluation.generate": False,
    "evaluation.interval_steps": None,
    "export.enabled": False,
    "logging.trackers": [],
    "logging.progress": "none",
}
BY_KIND: dict[str, dict[str, Any]] = {
    "watched": {
        "training.micro_batch_size": 8,
        "training.on_non_finite": "skip",
        "training.sentinel_interval": 500,
        "checkpoint.interval_steps": 250,
    },
    "waits": {
        "checkpoint.interval_steps": 50,
        "checkpoint.asynchronous": True,
        "checkpoint.keep": 1,
        "model.dtype": "float32",
        "training.micro_batch_size": 2,
        "training.global_batch_size": 2,
    },
}


def timed(owner: Any, name: str, spans: dict[str, list[tuple[float, float]]]) -> None:
    """Note the wall and CPU seconds of each call of a method."""
    call: Callable[..., Any] = getattr(owner, name)

    def wrapped(*of: Any, **more: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return call(*of, **more)
        finally:
            spans.setdefault(f"{owner.__name__}.{name}", []).append(
                (time.perf_counter() - wall, time.thread_time() - cpu)
            )

    setattr(owner, name, wrapped)


def one_process(kind: str, folder: Path) -> None:
    """A run with clocks; the main process writes them."""
    from vlmpack.api import resolve, run_recipe
    from vlmpack.training.checkpoint import Saver
    from vlmpack.training.checkpoint.safetensors_file import HostCopies
    from vlmpack.training.replicas import Replicas
    from vlmpack.training.sentinel import Sentinel
    from vlmpack.training.step import StepMemory
    from vlmpack.training.trainer import Trainer

    spans: dict[str, list[tuple[float, float]]] = {}
    clocks = {
        "watched": [
            *((Replicas, name) for name in ("on_start", "on_step", "on_save")),
            (Sentinel, "compare"),
            (StepMemory, "keep"),
        ],
        "waits": [(Saver, name) for name in ("save_in_background", "finish", "wait_for_copy")],
    }
    clocks["waits"].append((HostCopies, "copy"))  # on the thread
    for owner, name in [(Trainer, "_train"), *clocks[kind]]:
        timed(owner, name, spans)
    settings = {**ALWAYS, **BY_KIND[kind], "run_dir": str(folder / "run")}
    settings["training.max_steps"] = STEPS[kind]
    if kind == "waits":
        settings["model.path"] = str(folder / "model")
    run_recipe(resolve(ROOT / "recipes/digits-demo.yaml", settings))
    if os.environ.get("RANK", "0") == "0":
        (folder / "spans.json").write_text(json.dumps(spans))


def bench_saves(kind: str) -> dict[str, object]:
    """The spans of a run as shares of its steps."""
    processes = 2 if kind == "watched" else 1
    with tempfile.TemporaryDirectory(prefix="vlmpack-bench-") as name:
        folder = Path(name)
        if kind == "waits":
            write_wide_model(folder / "model", WIDTH, layers=LAYERS)
        command = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        subprocess.run(
            [sys.executable, "-m", *command, __file__, kind, name],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
        )
        spans = json.loads((folder / "spans.json").read_text())
        saved = max((folder / "run/checkpoints").glob("step*"))
        found: dict[str, object] = {
            "GB of a checkpoint": sum(file.stat().st_size for file in saved.iterdir()) / 1e9
        }
    steps = [sum(times) for times in zip(*spans.pop("Trainer._train"), strict=True)]
    if kind == "waits":  # the last save, after the steps, is waited for and no part of the goal
        spans["Saver.finish"].pop()
        copied = spans.pop("HostCopies.copy")
        found["copy on its thread, CPU ms"] = 1000 * sum(cpu for _, cpu in copied)
    found |= {"steps, wall s": steps[0], "steps, CPU s": steps[1]}
    totals = [0.0, 0.0]
    for call, times in spans.items():
        sums = [sum(each) for each in zip(*times, strict=True)]
        totals = [a + b for a, b in zip(totals, sums, strict=True)]
        found[f"{call}, wall ms"] = 1000 * sums[0]
        found[f"{call}, CPU ms"] = 1000 * sums[1]
        found[f"{call}, calls"] = len(times)
    found["share, wall"] = totals[0] / steps[0]
    found["share, CPU"] = totals[1] / steps[1]
    return found


if __name__ == "__main__":
    if len(sys.argv) > 2:
        one_process(sys.argv[1], Path(sys.argv[2]))
    else:
        for name, figure in bench_saves(sys.argv[1]).items():
            print(f"{name:36s} {figure:.5f}" if isinstance(figure, float) else f"{name} {figure}")
