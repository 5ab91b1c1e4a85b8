"""`make bench`: every benchmark in one run, as ratios, written to benchmarks/results/."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from bench_attention import bench_attention, bench_collator
from bench_data import bench_data
from bench_experts import bench_experts
from bench_fewest import bench_fewest
from bench_hybrid import bench_hybrid
from bench_launch import bench_launch, bench_many_shards
from bench_levels import bench_levels
from bench_memory import bench_context_memory
from bench_packers import bench_packers
from bench_plan import bench_plan
from bench_preference import bench_preference
from bench_records import bench_records
from bench_safety import bench_safety
from bench_segments import bench_segments
from bench_short import bench_short
from bench_step import bench_step
from bench_tower import bench_tower

RESULTS = Path(__file__).resolve().parent / "results"


def _hardware() -> dict[str, object]:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    return {
        "processor": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _show(name: str, figures: dict[str, object]) -> None:
    print(name)
    for key, value in figures.items():
        print(f"  {key:36s} {f'{value:.3f}' if isinstance(value, float) else value}")


def _benchmarks(rounds: int, before: str | None) -> dict[str, Callable[[], dict[str, object]]]:
    """By name; those of the Megatron engine where it is installed."""
    found: dict[str, Callable[[], dict[str, object]]] = {
        "collator": lambda: bench_collator(rounds),
        "attention": lambda: bench_attention(rounds),
        "segments": lambda: bench_segments(rounds),
        "experts": lambda: bench_experts(rounds),
        "hybrid": lambda: bench_hybrid(rounds),
        "data": lambda: bench_data(rounds),
        "records": lambda: bench_records(rounds),
        "levels": lambda: bench_levels(rounds),
        "launch": lambda: bench_launch(rounds, before),
        "many shards": lambda: bench_many_shards(min(rounds, 5), before),
        "plan": bench_plan,
        "safety": lambda: bench_safety(rounds),
        "short samples": lambda: bench_short(rounds, before),
        "fewest packs": lambda: bench_fewest(rounds),
        "packers": lambda: bench_packers(rounds),
        "step": lambda: bench_step(rounds, width=512),
        "step, demo model": lambda: bench_step(rounds, width=None),
        "preference": lambda: bench_preference(rounds, width=512),
    }
    if find_spec("megatron") is None:
        return found
    from bench_megatron import bench_megatron_step
    from bench_replica import bench_replica
    from bench_rope import bench_rope

    return found | {
        "rope, 16 sequences": lambda: bench_rope(rounds, sequences=16),
        "rope, 256 sequences": lambda: bench_rope(rounds, sequences=256),
        "megatron step": lambda: bench_megatron_step(rounds, width=512),
        "replica's data": lambda: bench_replica(rounds, before),
        "activation memory by context parallelism": bench_context_memory,
    }


def main() -> None:
    """Run, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each variant")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--before", help="an older checkout, which some are compared with")
    parser.add_argument("--only", help="benchmarks whose name contains this")
    arguments = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    benchmarks = _benchmarks(arguments.rounds, arguments.before)
    if arguments.before:
        benchmarks["tower"] = lambda: bench_tower(arguments.rounds, arguments.before)
    for name, run in benchmarks.items():
        if arguments.only and arguments.only not in name:
            continue
        results[name] = run()
        _show(name, results[name])
    if not arguments.no_save:
        RESULTS.mkdir(exist_ok=True)
        part = f"-{'-'.join(arguments.only.split())}" if arguments.only else ""
        command = f"python benchmarks/run.py --only {arguments.only!r}" if part else "make bench"
        if arguments.rounds != parser.get_default("rounds"):
            command += f" --rounds {arguments.rounds}"
        if arguments.before:
            command += " --before CHECKOUT"
        path = RESULTS / f"cpu-{time.strftime('%Y-%m-%d')}{part}.json"
        content = {"command": command, "hardware": _hardware(), "results": results}
        path.write_text(json.dumps(content, indent=2) + "\n")
        print(f"saved {path}")


if __name__ == "__main__":
    main()
