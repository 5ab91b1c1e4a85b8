"""Rows of metrics.jsonl -> the speed of a mean step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        micro_batches: of a mean step and replica.
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
    )


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(float(row[name]) for row in rows) / len(rows)


def scaled(speed: StepSpeed, slots: float) -> StepSpeed:
    """The speed of a step of so many slots: what is computed and read grows with them.

    Args:
        speed: measured.
        slots: of a mean step of the run, over the processes that were measured.
    """
    factor = slots / speed.slots if slots and speed.slots else 1.0
    return StepSpeed(
        measured_steps=speed.measured_steps,
        seconds=speed.seconds * factor,
        data_wait_seconds=speed.data_wait_seconds * factor,
        slots=slots or speed.slots,
    )
