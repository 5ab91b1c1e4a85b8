"""`plan_packs` on ten mixes of a million lengths, with one and with two budgets: packs and seconds.

Against best-fit-decreasing and the stream packer, each alone, in one run, and, where
VLMPACK_BEFORE_PYTHON names an interpreter that imports the version before, against its
`plan_packs`. CPU seconds of one thread, alternated, medians.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable

import numpy as np
from bench_packers import Process
from lengths import mixed_lengths
from timing import processor_medians

from vlmpack.packing import StreamPacker, plan_packs
from vlmpack.packing.limits import PackLimits, fewest_packs
from vlmpack.packing.offline import place_lengths, place_pairs

LENGTHS = 1_000_000


def bench_fewest(rounds: int) -> dict[str, object]:
    """All mixes."""
    figures: dict[str, object] = {"lengths": LENGTHS}
    for name, (lengths, second, capacity, budget) in length_mixes(LENGTHS).items():
        for budgets in (1, 2):
            with_second = (second, budget) if budgets == 2 else None
            found = _one(lengths, capacity, with_second, min(rounds, 3))
            figures |= {f"{name}, {budgets} budgets: {key}": found[key] for key in found}
    return figures


def length_mixes(count: int) -> dict[str, tuple[np.ndarray, np.ndarray, int, int]]:
    """Name -> (lengths, second, capacity, second budget)."""
    found: dict[str, tuple[np.ndarray, np.ndarray, int, int]] = {}
    for capacity in (4096, 8192, 16_384):
        tokens, patches = mixed_lengths(count, capacity)
        found[f"mixed into {capacity}"] = (tokens, patches, capacity, 4 * capacity)
    tokens, patches = mixed_lengths(count, 8192, seed=1)
    found["patches bind"] = (tokens, np.minimum(patches, 16_384), 8192, 16_384)
    for median, sigma in ((400, 0.9), (1000, 0.8), (2500, 0.6)):
        drawn = np.random.default_rng(median).lognormal(np.log(median), sigma, count)
        tokens = np.clip(drawn, 1, 8192).astype(np.int64)
        found[f"lognormal {median}"] = (tokens, np.minimum(tokens * 2, 8192), 8192, 32_768)
    random = np.random.default_rng(32)
    is_image = random.random(count) < 0.57
    short, long = random.integers(422, 1562, count), random.integers(2634, 3608, count)
    tokens = np.where(is_image, short, long)
    found["images are short"] = (tokens, np.where(is_image, 4 * tokens, 0), 8192, 8192)
    found["few packs over"] = (tokens, np.where(is_image, 4 * tokens, 0), 8192, 20_000)
    tokens = random.integers(2500, 4200, count)
    found["two to a pack"] = (tokens, tokens // 2, 8192, 8192)
    return found


def _one(
    lengths: np.ndarray, capacity: int, second: tuple[np.ndarray, int] | None, rounds: int
) -> dict[str, object]:
    extra, budget = second if second is not None else (None, None)
    limits = PackLimits(capacity=capacity, second_budget=budget)
    packs: dict[str, int] = {}

    def best_fit() -> None:
        if extra is None:
            packs["best_fit"] = int(place_lengths(lengths, capacity, len(lengths)).max()) + 1
        else:
            packs["best_fit"] = int(place_pairs(lengths, extra, limits, len(lengths)).max()) + 1

    def stream() -> None:
        packer = StreamPacker(capacity, second_budget=budget)
        others = [0] * len(lengths) if extra is None else extra.tolist()
        made = sum(len(packer.push(*one)) for one in zip(lengths.tolist(), others, strict=True))
        packs["stream"] = made + len(packer.flush())

    def plan() -> None:
        packs["plan"] = len(plan_packs(lengths, capacity, second=extra, second_budget=budget))

    variants: dict[str, Callable[[], None]] = {"best_fit": best_fit, "stream": stream, "plan": plan}
    seconds = processor_medians(variants, rounds=rounds)
    least = fewest_packs(lengths, extra, limits)
    figures: dict[str, object] = {
        "lower bound": least,
        **{f"{name}, packs": count for name, count in packs.items()},
        **{f"{name}, seconds": value for name, value in seconds.items()},
        "plan over both": seconds["plan"] / (seconds["best_fit"] + seconds["stream"]),
    }
    python = os.environ.get("VLMPACK_BEFORE_PYTHON")
    if python:
        figures |= _before(python, lengths, capacity, second, rounds)
    return figures


def _before(
    python: str,
    lengths: np.ndarray,
    capacity: int,
    second: tuple[np.ndarray, int] | None,
    rounds: int,
) -> dict[str, object]:
    """The version before and this one, in processes of their own, in turn."""
    with tempfile.TemporaryDirectory(prefix="vlmpack-bench-") as folder:
        path, other = f"{folder}/lengths.npy", f"{folder}/second.npy"
        np.save(path, lengths)
        more = []
        if second is not None:
            np.save(other, second[0])
            more = [other, str(second[1])]
        both = [
            Process(one, "vlmpack", path, str(capacity), *more) for one in (python, sys.executable)
        ]
        for _ in range(rounds):
            for one in both:
                one.run()
        for one in both:
            one.close()
    before, now = (statistics.median(one.runs) for one in both)
    return {
        "version before, packs": both[0].packs,
        "version before, seconds": before,
        "plan over version before": now / before,
    }
