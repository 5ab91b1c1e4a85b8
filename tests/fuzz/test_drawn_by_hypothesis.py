"""The same doors, their damage drawn by hypothesis, which looks for the smallest draw that fails.

A named error or a right result, whatever comes in; within a bound of memory. A hang ends with the
test's own time.
"""

from __future__ import annotations

import logging
import random
import resource
import warnings
from pathlib import Path

import pytest
from fuzz.test_doors import DOORS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fuzz import Door

from vlmpack.errors import VlmpackError

MOST_BYTES = 1 << 30
"""That the process may grow by, of inputs of kilobytes."""


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def draw_many(door: Door, folder: Path, count: int) -> int:
    """How many inputs were taken or refused by name."""
    go, before, done = door.open(folder), peak_bytes(), 0

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def each(draw: random.Random) -> None:
        nonlocal done
        try:
            go(draw)
        except VlmpackError as error:
            assert str(error), "an error without a word"
        done += 1

    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            each()
    finally:
        logging.disable(logging.NOTSET)
    assert peak_bytes() - before < MOST_BYTES
    return done


def count_of(door: Door, share: float) -> int:
    return max(2, round(share * door.share))


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_every_draw_is_taken_or_refused_by_name(door: Door, tmp_path: Path) -> None:
    count = count_of(door, 4)
    assert draw_many(door, tmp_path, count) >= min(count, 2)


@pytest.mark.soak
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_every_draw_of_many(door: Door, tmp_path: Path) -> None:
    assert draw_many(door, tmp_path, count_of(door, 3000)) >= 5


def test_what_fails_is_found_and_named(tmp_path: Path) -> None:
    """Control: a reader that knows no bytes but these."""

    def strict(draw: random.Random) -> None:
        if draw.randrange(1000) > 500:
            raise KeyError("bare")

    with pytest.raises(KeyError):
        draw_many(Door("control", 1, lambda _: strict), tmp_path, 50)
