"""Alternate the variants, take medians, quote ratios: one timing on a shared machine is noise."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def medians(
    variants: Mapping[str, Callable[[], object]], *, rounds: int, warm_up: int = 2
) -> dict[str, float]:
    """Median seconds of each variant; every round runs each of them once, in turn."""
    return _medians(variants, time.perf_counter, rounds=rounds, warm_up=warm_up)


def processor_medians(
    variants: Mapping[str, Callable[[], object]], *, rounds: int
) -> dict[str, float]:
    """The same in CPU seconds of this process: what an idle core takes."""
    return _medians(variants, time.process_time, rounds=rounds, warm_up=0)


def _medians(
    variants: Mapping[str, Callable[[], object]],
    clock: Callable[[], float],
    *,
    rounds: int,
    warm_up: int,
) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(warm_up + rounds):
        for name, run in variants.items():
            started = clock()
            run()
            if index >= warm_up:
                seconds[name].append(clock() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def against_ideal(
    seconds: Mapping[str, float], *, num_batches: int, real_tokens: int, padded_slots: int
) -> dict[str, object]:
    """Packed against padded, as shares of what packing could win at most.

    Args:
        seconds: `language_packed`, `language_padded`, `step_packed` and `step_padded`, each over
            `num_batches` micro-batches of the same samples.
        num_batches: micro-batches.
        real_tokens: tokens of their samples.
        padded_slots: slots of the padded rows.
    """
    r = padded_slots / real_tokens
    language = seconds["language_packed"]
    rest = max(0.0, seconds["step_packed"] - language)
    step_speedup = seconds["step_padded"] / seconds["step_packed"]
    language_speedup = seconds["language_padded"] / language
    ideal = (rest + language * r) / (rest + language)
    return {
        "r_padded_over_real": r,
        "V_ms": rest * 1e3 / num_batches,
        "L_ms": language * 1e3 / num_batches,
        "step_speedup": step_speedup,
        "ideal_step_speedup": ideal,
        "step_share_of_ideal": step_speedup / ideal,
        "language_speedup": language_speedup,
        "language_share_of_r": language_speedup / r,
        "packed_real_tokens_per_second": real_tokens / seconds["step_packed"],
    }
