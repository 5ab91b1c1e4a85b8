"""A row of 16 images through the vision tower, forward and backward: this checkout against an older
one beside it, each in a process of its own, in turn."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
WIDTHS = (64, 128)
IMAGES = 16


def rows_of_grids() -> dict[str, str]:
    """By name, the grids of 16 images in patches: one row of digits, all one size that windows do
    not divide, and sizes drawn at random."""
    draw = random.Random(1)
    digits = [f"2x{2 * draw.randint(1, 9)}" for _ in range(IMAGES)]
    mixed = [f"{2 * draw.randint(2, 12)}x{2 * draw.randint(2, 12)}" for _ in range(IMAGES)]
    named = {"digits": digits, "equal": ["10x10"] * IMAGES, "mixed": mixed}
    return {name: ",".join(grids) for name, grids in named.items()}


def bench_tower(rounds: int, before: str) -> dict[str, object]:
    """CPU milliseconds and attention calls of both, and how many times as fast this one is.

    Args:
        rounds: timed rounds of each.
        before: the older checkout.
    """
    figures: dict[str, object] = {"model": "tiny-qwen2_5_vl's shape by width, float32, one thread"}
    for name, grids in rows_of_grids().items():
        for width in WIDTHS:
            checkouts = {"before": before, "now": str(HERE.parent)}
            seconds, calls = _in_turn(checkouts, width, grids, rounds)
            for side, count in calls.items():
                figures[f"{name}_{width}_calls_{side}"] = count
                figures[f"{name}_{width}_ms_{side}"] = 1e3 * seconds[side]
            figures[f"{name}_{width}_speedup"] = seconds["before"] / seconds["now"]
    return figures


def _in_turn(
    checkouts: dict[str, str], width: int, grids: str, rounds: int
) -> tuple[dict[str, float], dict[str, int]]:
    """Median CPU seconds, and attention calls of a forward, by name."""
    running = {
        name: subprocess.Popen(
            [sys.executable, "-W", "ignore", HERE / "tower_process.py", path, str(width), grids],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for name, path in checkouts.items()
    }
    calls = {name: int(_answer(process)) for name, process in running.items()}
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for index in range(2 + rounds):
        for name, process in running.items():
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            taken = float(_answer(process))
            if index >= 2:
                seconds[name].append(taken)
    for process in running.values():
        process.communicate()
    return {name: statistics.median(values) for name, values in seconds.items()}, calls


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()
