"""Rows of metrics.jsonl -> the speed of a mean step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any

from vlmpack.forecast.measured import StepSpeed
from vlmpack.recipe.data import DataSection

LEAST_STEPS = 8
"""Measured at least, where the run has so many."""


def steps_ahead(data: DataSection, micro_batches: float) -> int:
    """Steps at the beginning that say nothing about later ones: the first, which warms up, and
    those whose data the loader has read while the model was loaded.

    Args:
        data: its workers, and what each reads ahead.
        micro_batches: of a step and replica.
    """
    read = data.num_workers * data.prefetch_batches + 1
    return 2 + ceil(read / max(1.0, micro_batches))


def is_enough(rows: Sequence[Mapping[str, Any]], ahead: int, seconds: float) -> bool:
    """Whether so many steps and seconds behind the first ones have been measured."""
    measured = rows[ahead:]
    return len(measured) >= LEAST_STEPS and sum(row["seconds"] for row in measured) >= seconds


def speed_of(rows: Sequence[Mapping[str, Any]], ahead: int) -> StepSpeed | None:
    """The mean step behind the first `ahead`; of a shorter run, of its last half.

    Returns:
        None without a row.
    """
    measured = rows[ahead:] or rows[len(rows) // 2 :]
    if not measured:
        return None
    return StepSpeed(
        measured_steps=len(measured),
        seconds=_mean(measured, "seconds"),
        data_wait_seconds=_mean(measured, "data_wait_seconds"),
        slots=_mean(measured, "num_slots"),
        tokens=_mean(measured, "num_tokens"),
    )


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(float(row[name]) for row in rows) / len(rows)


def scaled(speed: StepSpeed, factor: float) -> StepSpeed:
    """The speed of a step of so many times the work: what is computed and read grows with it."""
    return StepSpeed(
        measured_steps=speed.measured_steps,
        seconds=speed.seconds * factor,
        data_wait_seconds=speed.data_wait_seconds * factor,
        slots=speed.slots * factor,
        tokens=speed.tokens * factor,
    )


def together(speeds: Sequence[StepSpeed]) -> StepSpeed:
    """The mean step of measurements of the same setting, each with its number of steps."""
    steps = sum(speed.measured_steps for speed in speeds)

    def mean(name: str) -> float:
        total = sum(speed.measured_steps * float(getattr(speed, name)) for speed in speeds)
        return total / steps

    return StepSpeed(
        measured_steps=steps,
        seconds=mean("seconds"),
        data_wait_seconds=mean("data_wait_seconds"),
        slots=mean("slots"),
        tokens=mean("tokens"),
    )


def per_token(speed: StepSpeed) -> float:
    """Seconds of a real token, of which every setting trains the same."""
    return speed.seconds / max(1.0, speed.tokens)


def spread_of(speeds: Iterable[Sequence[StepSpeed]]) -> float | None:
    """The largest difference, relative, between measurements of one setting.

    Args:
        speeds: of each setting.

    Returns:
        None where none was measured twice.
    """
    found = []
    for of_one in speeds:
        each = [per_token(speed) for speed in of_one]
        if len(each) > 1:
            found.append(max(each) / max(1e-12, min(each)) - 1)
    return max(found, default=None)
