"""What a replica of TP 2 x CP 2 waits for its data, on loopback, with 300 KB of pixels a sample:
this checkout against an older one beside it, in turn.

Four processes on one machine, gloo, one loader process each where each reads its own share. `data`
runs as fast as it can; the share of a step's time that the processes wait for it is what the lead's
`metrics.jsonl` says, and the vote is timed by itself.
"""

from __future__ import annotations

import io
import json
import os
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from models import ROOT
from PIL import Image

PROCESSES, SAMPLES, SIDE = 4, 64, 112
"""112 x 112 pixels are 64 patches of 1,176 float32: 301 KB."""
STEPS, FIRST = 8, 2
"""Steps of a run, and how many of them are not counted."""


def bench_replica(rounds: int, before: str | None) -> dict[str, object]:
    """Seconds of a step, seconds of waiting in it, and its share; and the vote alone.

    Args:
        rounds: runs of each checkout.
        before: the older one.
    """
    trees = ({"before": Path(before)} if before else {}) | {"now": ROOT}
    found: dict[str, list[list[dict[str, float]]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory(prefix="vlmpack-bench-") as name:
        folder = Path(name)
        _write_shard(folder / "train-000000.tar")
        for number in range(rounds):
            for tree, path in trees.items():
                found[tree].append(_run(path, folder, f"{tree}-{number}"))
    figures: dict[str, object] = {
        "layout": "TP 2 x CP 2, the tiny Qwen2.5-VL, 4 rows of 4 samples a step, 301 KB each"
    }
    shares = {}
    for tree, runs in found.items():
        steps = [row for rows in runs for row in rows]
        waited = statistics.median(row["data_wait_seconds"] for row in steps)
        whole = statistics.median(row["seconds"] for row in steps)
        shares[tree] = statistics.median(row["data_wait_share"] for row in steps)
        figures |= {
            f"{tree}_step_ms": 1e3 * whole,
            f"{tree}_wait_ms": 1e3 * waited,
            f"{tree}_wait_share": shares[tree],
        }
    if before:
        figures["share_of_before"] = shares["now"] / shares["before"]
    return figures | {"vote_ms": _vote_ms()}


def _write_shard(path: Path) -> None:
    draw = np.random.default_rng(0)
    with tarfile.open(path, "w") as tar:
        for number in range(SAMPLES):
            small = Image.fromarray(draw.integers(0, 256, (7, 7, 3), dtype=np.uint8))
            stream = io.BytesIO()
            small.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
            parts = [{"type": "image"}, {"type": "text", "text": f"What is {number}?"}]
            turns = [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": f"It is {number}."},
            ]
            files = {"json": json.dumps({"messages": turns}).encode(), "0.jpg": stream.getvalue()}
            for suffix, data in files.items():
                entry = tarfile.TarInfo(f"{number:06d}.{suffix}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))


def _run(tree: Path, folder: Path, name: str) -> list[dict[str, float]]:
    """The rows of metrics.jsonl behind the first steps."""
    recipe = {
        "model": {"path": str(ROOT / "assets/tiny-qwen2_5_vl"), "backend": "mcore"},
        "data": {
            "train": str(folder / "train-*.tar"),
            "num_workers": 1,
            "index_dir": str(folder / "index"),
        },
        "packing": {"mode": "in_batch"},
        "parallelism": {"tensor": 2, "context": 2},
        "training": {
            "micro_batch_size": 4,
            "global_batch_size": 16,
            "seq_length": 256,
            "max_steps": STEPS,
        },
        "optim": {"lr": 1e-4},
        "evaluation": {"generate": False},
        "checkpoint": {"interval_steps": None},
        "export": {"enabled": False},
        "logging": {"progress": "none", "trackers": []},
        "run_dir": str(folder / name),
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(recipe))
    _in_ranks(["-m", "vlmpack", "finetune", str(path)], tree)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    assert len(rows) == STEPS
    return rows[FIRST:]


def _in_ranks(command: list[str], tree: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": PROCESSES, "LOCAL_WORLD_SIZE": PROCESSES, "MASTER_PORT": port}
    shared = {name: str(value) for name, value in world.items()}
    shared |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *command],
            cwd=tree,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(PROCESSES)
    ]
    codes = [process.wait() for process in running]
    assert codes == [0] * PROCESSES, codes


def _vote_ms() -> float:
    """Median milliseconds of a vote by itself, of four processes that do nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        _in_ranks([__file__, str(Path(folder) / "vote")], ROOT)
        return float((Path(folder) / "vote").read_text())


def _vote(out: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    values = torch.tensor([1])
    gathered = [torch.empty_like(values) for _ in range(PROCESSES)]
    seconds = []
    for _ in range(300):
        started = time.perf_counter()
        dist.all_gather(gathered, values)
        seconds.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        out.write_text(str(1e3 * statistics.median(seconds[50:])))
    dist.destroy_process_group()


if __name__ == "__main__":
    _vote(Path(sys.argv[1]))
