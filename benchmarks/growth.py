"""What indexing costs as data grow: seconds, and the peak memory of a process.

    python benchmarks/growth.py                     # 50,000 records of JSONL
    python benchmarks/growth.py --records 1000000   # as many as an issue asks about
    python benchmarks/growth.py --shards 20000      # tar files of 5 conversations instead

One file of text conversations is indexed and measured for the tiny Qwen2.5-VL by one process, and
by two that share the file. The runs alternate, and ratios are of medians. Memory is the resident
set of the largest process, of which there may be several.

Shards are indexed by one process and by two as well, then again, and planned twice.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "assets" / "tiny-qwen2_5_vl"


def record(number: int) -> bytes:
    """A conversation of about 500 bytes."""
    words = " ".join(f"w{(number * k) % 997}" for k in range(1, 60))
    turns = [
        {"role": "user", "content": f"question {number}: {words}"},
        {"role": "assistant", "content": f"answer {number % 13}: {words[:120]}"},
    ]
    return json.dumps({"messages": turns}).encode()


def write_records(path: Path, count: int) -> None:
    """One file of so many conversations."""
    with path.open("wb") as stream:
        for number in range(count):
            stream.write(record(number) + b"\n")


def write_shards(folder: Path, count: int) -> None:
    """So many tar files of 5 conversations."""
    for shard in range(count):
        with tarfile.open(folder / f"s-{shard:05d}.tar", "w") as tar:
            for number in range(5 * shard, 5 * shard + 5):
                data = record(number)
                member = tarfile.TarInfo(f"{number:07d}.json")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def asked(data: str, folder: str, command: str, *options: str) -> tuple[float, float]:
    """Seconds and MiB of a command on a recipe, whose index lies in a folder."""
    recipe = {
        "run_dir": str(Path(folder) / "run"),
        "model": {"path": str(MODEL)},
        "data": {"train": data, "index_dir": str(Path(folder) / "index")},
        "training": {
            "seq_length": 4096,
            "micro_batch_size": 8,
            "global_batch_size": 8,
            "max_steps": 1,
        },
        "optim": {"lr": 1e-5},
        "packing": {"mode": "in_batch"},
    }
    written = Path(folder) / "recipe.yaml"
    written.write_text(json.dumps(recipe))
    given = [str(written)] if command == "plan" else ["--recipe", str(written)]
    whole = [sys.executable, "-m", "vlmpack", command, *given, *options]
    started = perf_counter()
    # A process of its own waits for it, so that its memory is not that of an earlier one.
    watched = [sys.executable, __file__, "--peak", json.dumps(whole)]
    done = subprocess.run(watched, check=True, stdout=subprocess.PIPE, text=True)
    return perf_counter() - started, float(done.stdout.splitlines()[-1])


def peak(command: Sequence[str]) -> float:
    """MiB of the largest process of a command."""
    subprocess.run(command, check=True, stdout=sys.stderr)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def compare(data: str, rounds: int, then: Sequence[tuple[str, ...]] = ()) -> None:
    """Index from nothing by one process and by two in turn. Further commands follow the last."""
    runs: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    later: list[tuple[float, float]] = []
    for turn in range(rounds):
        for processes, found in runs.items():
            with tempfile.TemporaryDirectory() as folder:
                found.append(asked(data, folder, "index", "--processes", str(processes)))
                if turn == rounds - 1 and processes == 2:
                    later = [asked(data, folder, *each) for each in then]
    for processes, found in runs.items():
        seconds, mib = (median(column) for column in zip(*found, strict=True))
        print(f"  --processes {processes}: {seconds:.1f} s, {mib:.0f} MiB a process")
    one, two = (median(seconds for seconds, _ in found) for found in runs.values())
    print(f"  two over one: {two / one:.2f}")
    for command, (seconds, mib) in zip(then, later, strict=True):
        print(f"  then {' '.join(command)}: {seconds:.1f} s, {mib:.0f} MiB a process")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=50_000)
    parser.add_argument("--shards", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        print(peak(json.loads(given.peak)))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        if given.shards:
            write_shards(Path(folder), given.shards)
            print(f"{given.shards:,} shards of 5 samples", flush=True)
            compare(f"{folder}/*.tar", given.rounds, [("index",), ("plan",), ("plan",)])
            return
        path = Path(folder) / "records.jsonl"
        write_records(path, given.records)
        size = path.stat().st_size / 1e6
        print(f"{given.records:,} records of JSONL, {size:.0f} MB", flush=True)
        compare(str(path), given.rounds)


if __name__ == "__main__":
    main()
