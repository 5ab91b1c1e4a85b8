"""Alternate the variants, take medians, quote ratios: one timing on a shared machine is noise."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def medians(
    variants: Mapping[str, Callable[[], object]], *, rounds: int, warm_up: int = 2
) -> dict[str, float]:
    """Median seconds of each variant; every round runs each of them once, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(warm_up + rounds):
        for name, run in variants.items():
            started = time.perf_counter()
            run()
            if index >= warm_up:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}
