"""Advantages of answers within their groups, against a literal loop in double precision."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest

from vlmpack.data.index.rollouts import (
    NONE,
    Outcomes,
    RolloutColumns,
    advantages_of,
    rollout_row,
)


def literal(groups: list[int], rewards: list[float], scale: str) -> list[float]:
    """One answer at a time."""
    found = []
    for group, reward in zip(groups, rewards, strict=True):
        own = [r for g, r in zip(groups, rewards, strict=True) if g == group]
        mean = math.fsum(own) / len(own)
        if len(set(own)) == 1:
            found.append(0.0)
        elif scale == "std":
            found.append((reward - mean) / (statistics.stdev(own) + 1e-6))
        else:
            found.append(reward - mean)
    return found


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("seed", range(5))
def test_advantages_are_the_literal_ones(scale: str, seed: int) -> None:
    draw = random.Random(seed)
    groups = [draw.choice([-(1 << 62), -5, 0, 3, 9, 11, (1 << 62)]) for _ in range(60)]
    rewards = [draw.choice([0.0, 1.0, 0.1, draw.gauss(3, 100)]) for _ in groups]
    found = advantages_of(np.array(groups), np.array(rewards), scale)
    expected = literal(groups, rewards, scale)
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert sum(abs(value) > 1e-3 for value in expected) > 30
    assert np.abs(found).max() > 1


def test_no_difference_is_exactly_0() -> None:
    """Thrice 0.1 has a mean above 0.1, which rounds to another advantage than 0."""
    groups, rewards = np.array([4, 4, 4, 9]), np.array([0.1, 0.1, 0.1, 7.0])
    assert (rewards[:3] - rewards[:3].sum() / 3).any()
    assert advantages_of(groups, rewards, "std").tolist() == [0, 0, 0, 0]
    assert advantages_of(groups, rewards, "none").tolist() == [0, 0, 0, 0]


def columns(rows: list[tuple[int, float, int, int]]) -> RolloutColumns:
    """Of (group, reward, number, version)."""
    groups, rewards, numbers, versions = (np.array(each) for each in zip(*rows, strict=True))
    bits = rewards.astype(np.float64).view(np.int64)
    zeros = np.zeros(len(rows), dtype=np.int64)
    return RolloutColumns(groups, bits, numbers, versions, zeros, zeros + (numbers == 1))


def test_outcomes_are_counted() -> None:
    rows = [(1, 0.5, 0, 0), (1, 1.5, 1, 0), (2, 3.0, 0, 0), (3, -1.0, 0, 0), (3, -1.0, 1, 0)]
    unread = (0, 0.0, NONE, 0)
    whole = np.ones(7, dtype=np.bool_)
    found = Outcomes.of(columns([unread, *rows, unread]), "none", whole)
    assert found.advantages.tolist() == [0, -0.5, 0.5, 0, 0, 0, 0]
    assert found.rewards[1:-1].tolist() == [0.5, 1.5, 3.0, -1.0, -1.0]
    assert np.isnan(found.rewards[[0, -1]]).all()
    assert found.counts == {
        "num_answers": 5,
        "num_groups": 3,
        "num_alone": 1,
        "num_equal": 2,
        "num_otherwise": 2,
    }
    assert "5 answers in 3 groups. 1 are alone in theirs and 2 in one of equal" in found.words
    assert "40.0% of the answers" in found.words
    assert Outcomes.of(columns([unread]), "std", whole[:1]).num_answers == 0
    part = np.array([True, True, False, False, True, True, True])
    held = Outcomes.of(columns([unread, *rows, unread]), "none", part)
    assert held.advantages.tolist() == found.advantages.tolist(), "all rewards of a group count"
    assert [*held.counts.values()] == [3, 2, 0, 2, 1]


def test_names_are_unique() -> None:
    rows = [(1, 0.0, 0, 0), (2, 0.0, 0, 0), (1, 0.0, 1, 0), (1, 0.0, 0, 1)]
    assert columns(rows).repeated() is None
    assert columns([*rows, (2, 9.0, 0, 0)]).repeated() == (1, 4)
    assert columns([(0, 0.0, NONE, 0)] * 3).repeated() is None


def test_a_record_without_a_draw_has_a_row() -> None:
    assert rollout_row(None)["rollout_number"] == NONE
