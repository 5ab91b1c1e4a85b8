"""A plan of a million short samples: seconds, fill and packs of one commit beside another.

Each side plans in a process of its own, in turn: `vlmpack plan`'s figures in mode `online`, and
`plan_packs` over all lengths. CPU seconds of one thread; ratios are of medians.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from bench_plan import CAPACITY, SAMPLES, Lengths, synthetic_inputs
from lengths import mixed_lengths

HERE = Path(__file__).resolve().parent


def of_63(count: int, _: int) -> tuple[np.ndarray, np.ndarray]:
    """Text of 63 tokens each."""
    return np.full(count, 63), np.zeros(count, np.int64)


def about_63(count: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Text of 16 tokens and more, 63 on average."""
    drawn = 16 + np.random.default_rng(0).exponential(47, count)
    return np.minimum(drawn, most).astype(np.int64), np.zeros(count, np.int64)


MIXES: dict[str, tuple[Lengths, int | None]] = {
    "63 tokens": (of_63, None),
    "63 tokens, max_sequences 256": (of_63, 256),
    "about 63 tokens": (about_63, None),
    "about 63 tokens, max_sequences 256": (about_63, 256),
    "about 63 tokens, max_sequences 128": (about_63, 128),
    "about 63 tokens, max_sequences 32": (about_63, 32),
    "text and images": (mixed_lengths, None),
}
"""Name -> lengths, and `packing.max_sequences`; None for `auto`."""


def bench_short(rounds: int, before: str | None) -> dict[str, object]:
    """All mixes.

    Args:
        rounds: of each side, at most 3.
        before: the older checkout; None for this one alone.
    """
    checkouts = {"now": str(HERE.parent), **({"before": before} if before else {})}
    figures: dict[str, object] = {"samples": SAMPLES, "row tokens": CAPACITY}
    figures |= {f"commit, {side}": _commit(checkout) for side, checkout in checkouts.items()}
    for mix in MIXES:
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in checkouts}
        for _ in range(min(rounds, 3)):
            for side, checkout in checkouts.items():
                runs[side].append(_run(mix, checkout))
        found = {
            side: {key: statistics.median(run[key] for run in each) for key in each[0]}
            for side, each in runs.items()
        }
        for side, values in found.items():
            figures |= {f"{mix}: {key}, {side}": value for key, value in values.items()}
        if before:
            for key in ("plan seconds", "bfd seconds"):
                ratio = found["now"][key] / found["before"][key]
                figures[f"{mix}: {key}, now over before"] = ratio
    return figures


def _commit(checkout: str) -> str:
    command = ["git", "-C", checkout, "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _run(mix: str, checkout: str) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve()), mix]
    environment = {**os.environ, "PYTHONPATH": checkout, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(mix: str) -> None:
    """One mix, in this process."""
    from vlmpack.forecast.make import plan_figures

    lengths, most = MIXES[mix]
    # Alignment 8 would round 63 up to 64, so that 98.4% is all that there is.
    settings: dict[str, object] = {"packing__alignment": 1}
    if most is not None:
        settings["packing__max_sequences"] = most
    started = time.process_time()
    inputs = synthetic_inputs(SAMPLES, "online", lengths, **settings)
    plan = plan_figures(inputs)
    planned = time.process_time()
    tokens, patches = lengths(SAMPLES, CAPACITY)
    budget = replace(inputs.config.mode.budget, max_sequences=most)
    packs = budget.packs(tokens, patches)
    done = time.process_time()
    figures = {
        "plan seconds": planned - started,
        "row fill": plan.mode.row_fill,
        "most samples in a row": plan.sequences.percentiles["max"],
        "bfd seconds": done - planned,
        "bfd packs": len(packs),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1])
