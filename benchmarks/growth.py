"""What indexing costs as data grow: seconds, and the peak memory of a process.

    python benchmarks/growth.py                     # 50,000 records of JSONL
    python benchmarks/growth.py --records 1000000   # as many as an issue asks about

One file of text conversations is indexed and measured for the tiny Qwen2.5-VL by one process, and
by two that share the file. The runs alternate, and ratios are of medians. Memory is the resident
set of the largest process, of which there may be several.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "assets" / "tiny-qwen2_5_vl"


def write_records(path: Path, count: int) -> None:
    """Conversations of about 500 bytes."""
    with path.open("w") as stream:
        for number in range(count):
            words = " ".join(f"w{(number * k) % 997}" for k in range(1, 60))
            turns = [
                {"role": "user", "content": f"question {number}: {words}"},
                {"role": "assistant", "content": f"answer {number % 13}: {words[:120]}"},
            ]
            stream.write(json.dumps({"messages": turns}) + "\n")


def indexed(path: Path, processes: int) -> tuple[float, float]:
    """Seconds and MiB of `vlmpack index` from nothing."""
    recipe = {
        "run_dir": str(path.parent / "run"),
        "model": {"path": str(MODEL)},
        "data": {"train": str(path)},
        "training": {
            "seq_length": 4096,
            "micro_batch_size": 8,
            "global_batch_size": 8,
            "max_steps": 1,
        },
        "optim": {"lr": 1e-5},
        "packing": {"mode": "in_batch"},
    }
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "recipe.yaml"
        written.write_text(json.dumps(recipe))
        command = [sys.executable, "-m", "vlmpack", "index", "--recipe", str(written)]
        command += ["--index-dir", folder, "--processes", str(processes)]
        started = perf_counter()
        # A process of its own waits for it, so that its memory is not that of an earlier one.
        asked = [sys.executable, __file__, "--peak", json.dumps(command)]
        done = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True)
        return perf_counter() - started, float(done.stdout.splitlines()[-1])


def peak(command: Sequence[str]) -> float:
    """MiB of the largest process of a command."""
    subprocess.run(command, check=True, stdout=sys.stderr)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peak:
        print(peak(json.loads(asked.peak)))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        write_records(path, asked.records)
        size = path.stat().st_size / 1e6
        print(f"{asked.records:,} records of JSONL, {size:.0f} MB")
        runs: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
        for _ in range(asked.rounds):
            for processes, found in runs.items():
                found.append(indexed(path, processes))
        for processes, found in runs.items():
            seconds, mib = (median(column) for column in zip(*found, strict=True))
            print(f"  --processes {processes}: {seconds:.1f} s, {mib:.0f} MiB a process")
        one, two = (median(seconds for seconds, _ in found) for found in runs.values())
        print(f"  two over one: {two / one:.2f}")


if __name__ == "__main__":
    main()
