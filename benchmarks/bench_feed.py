"""Whether the loader keeps up with the digits training at 40 ms a request.

`vlmpack finetune recipes/digits-demo.yaml`, a process each time, the same samples in the same
order: from local files; over HTTP with 40 ms before every answer, as the recipe stands; and so
again without a cache, where every micro-batch asks for its samples by range. A step's seconds are
those of metrics.jsonl, waits for data included. The first step is left out, in which the first
window is indexed. On a machine that others use too, step rates differ by what those do; so there is
also the ratio that the waits for data alone make, with the median of all runs' other seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from loopback import serve
from models import ROOT

RECIPE = ROOT / "recipes" / "digits-demo.yaml"
DIGITS = ROOT / "assets" / "digits"
STEPS = 41


@dataclass(frozen=True)
class Feed:
    """A run behind its first step."""

    seconds: float
    """Of a step."""
    waits: float
    """Seconds of a step in which the model waits for its data."""
    losses: tuple[float, ...]


def bench_feed(work: Path, rounds: int, latency_ms: float) -> dict[str, object]:
    """Step rates and waits, each the median of some runs that alternate."""
    bucket = work / "root" / "digits"  # named as the local folder: a source is called after it
    bucket.mkdir(parents=True)
    for shard in DIGITS.glob("train-*.tar"):
        shutil.copy(shard, bucket)
    count = len(list(bucket.iterdir()))
    found: dict[str, list[Feed]] = {"local": [], "far": [], "far_uncached": []}
    with serve(work / "root", latency_ms=latency_ms) as server:
        far = f"{server.url}/digits/train-{{000000..{count - 1:06d}}}.tar"
        for _ in range(rounds):
            found["local"].append(_train(work, str(DIGITS / "train-*.tar")))
            found["far"].append(_train(work, far))
            found["far_uncached"].append(_train(work, far, "data.cache.max_bytes=0"))
    losses = {feed.losses for feeds in found.values() for feed in feeds}
    assert len(losses) == 1, "the runs did not train on the same samples"
    seconds = {n: statistics.median(feed.seconds for feed in feeds) for n, feeds in found.items()}
    waits = {n: statistics.median(feed.waits for feed in feeds) for n, feeds in found.items()}
    rest = statistics.median(f.seconds - f.waits for feeds in found.values() for f in feeds)
    figures: dict[str, object] = {"digits_local_steps_per_second": 1 / seconds["local"]}
    for name in ("far", "far_uncached"):
        by_waits = (rest + waits["local"]) / (rest + waits[name])
        figures[f"digits_step_rate_{name}_of_local"] = seconds["local"] / seconds[name]
        figures[f"digits_step_rate_{name}_of_local_by_waits"] = by_waits
    return figures | {f"digits_{name}_wait_ms": 1e3 * value for name, value in waits.items()}


def _train(work: Path, shards: str, *changes: str) -> Feed:
    """One run with an index and a cache of its own."""
    run = work / "run"
    shutil.rmtree(run, ignore_errors=True)
    overrides = {
        "model.path": ROOT / "assets" / "tiny-qwen2_5_vl",
        "data.train": shards,
        "data.validation": "null",
        "data.test": "null",
        "data.shuffle": "window",
        "data.storage.allow_private": "true",
        "training.max_steps": STEPS,
        "evaluation.interval_steps": "null",
        "evaluation.generate": "false",
        "checkpoint.interval_steps": "null",
        "run_dir": run / "out",
    }
    command = [sys.executable, "-m", "vlmpack", "finetune", str(RECIPE)]
    command += [f"{key}={value}" for key, value in overrides.items()]
    environment = {**os.environ, "VLMPACK_CACHE": str(run / "cache" / "index")}
    done = subprocess.run(
        [*command, *changes], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (run / "out" / "metrics.jsonl").read_text().splitlines()
    rows = [row for line in lines if "seconds" in (row := json.loads(line))]
    assert len(rows) == STEPS, len(rows)
    seconds = sum(row["seconds"] for row in rows[1:])
    waits = sum(row["data_wait_seconds"] for row in rows[1:])
    losses = tuple(row["loss"] for row in rows)
    return Feed(seconds / (STEPS - 1), waits / (STEPS - 1), losses)
