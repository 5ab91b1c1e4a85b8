"""Orders in which groups stand together: every sample once, groups whole, seeded, unbiased."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, islice
from typing import Literal

import numpy as np
import pytest

from vlmpack.data.index.groups import group_numbers
from vlmpack.data.index.table import Int64s
from vlmpack.data.plan.batches import Plan, PlanSource, Position, grouped_order, in_groups
from vlmpack.data.plan.packers import FixedPacker


def drawn_groups(generator: np.random.Generator, first: int, count: int) -> Int64s:
    """Groups of some consecutive samples, spread over them; about a third stand alone."""
    digests = generator.integers(-count // 6, max(1, count // 6), count)
    digests[generator.random(count) < 0.3] = 0
    return group_numbers(np.arange(first, first + count, dtype=np.int64), digests)


def runs(groups: Int64s, order: Int64s) -> Counter[int]:
    """How many unbroken runs each group has in an order of samples."""
    return Counter(group for group, _ in groupby(groups[order].tolist()))


def test_groups_stand_together_and_every_sample_is_there_once() -> None:
    generator = np.random.default_rng(3)
    broken = 0
    for case in range(60):
        count = int(generator.integers(0, 90))
        groups = drawn_groups(generator, 0, count)
        numbers = np.arange(count, dtype=np.int64)
        order = grouped_order(numbers, groups, case)
        assert sorted(order.tolist()) == list(range(count))
        assert all(times == 1 for times in runs(groups, order).values())
        assert (order == grouped_order(numbers, groups, case)).all()
        assert count < 9 or (order != grouped_order(numbers, groups, case, "other")).any()
        broken += any(times > 1 for times in runs(groups, numbers).values())
    assert broken > 40, "nothing had to be brought together"


def test_the_place_of_a_group_says_nothing_about_its_size() -> None:
    """A group of 9 and one of 1 among 40: the large one comes first as often as not."""
    groups = np.array([0] * 9 + list(range(9, 40)), dtype=np.int64)
    numbers = np.arange(40, dtype=np.int64)
    before = sum(
        order.index(0) < order.index(39)
        for order in (grouped_order(numbers, groups, seed).tolist() for seed in range(400))
    )
    assert 160 < before < 240


def test_copies_of_a_sample_are_not_brought_together() -> None:
    numbers = np.array([4, 5, 6, 4, 5, 6], dtype=np.int64)
    order = grouped_order(numbers, np.array([4, 4, 6, 4, 4, 6]), 1)
    places = np.array([0, 0, 1, 2, 2, 3])[order]  # the unit of each
    assert len(list(groupby(places.tolist()))) == 4
    assert sorted(order.tolist()) == list(range(6))


def test_without_a_shuffle_a_group_stands_where_its_first_sample_does() -> None:
    assert in_groups(np.array([3, 1, 3, 7, 1])).tolist() == [0, 2, 1, 4, 3]


def plan_of(groups: Int64s | None, seed: int, shuffle: Literal["global", "none"]) -> Plan:
    sources = [
        PlanSource("a", np.arange(70, dtype=np.int64), 150),
        PlanSource("b", np.arange(70, 200, dtype=np.int64), 100),
    ]
    return Plan(
        sources, seed=seed, shuffle=shuffle, window=48, packer=FixedPacker(8, 3), groups=groups
    )


def both_sources(seed: int) -> Int64s:
    generator = np.random.default_rng(seed)
    return np.concatenate([drawn_groups(generator, 0, 70), drawn_groups(generator, 70, 130)])


@pytest.mark.parametrize("shuffle", ["global", "none"])
def test_a_plan_cuts_groups_at_its_own_borders_alone(shuffle: Literal["global", "none"]) -> None:
    """In a window a group is one run for each pass over its source that the window takes part of;
    the draws of each source stay what they are without groups."""
    for seed in range(4):
        groups = both_sources(seed)
        plan, plain = plan_of(groups, seed, shuffle), plan_of(None, seed, shuffle)
        whole = broken = 0
        for epoch, window in ((e, w) for e in range(3) for w in range(plan.num_windows)):
            order, before = plan.window_order(epoch, window), plain.window_order(epoch, window)
            assert ((order < 70).sum(), order.size) == ((before < 70).sum(), before.size)
            copies = Counter(order.tolist())
            most = Counter[int]()
            for number, times in copies.items():
                most[int(groups[number])] = max(most[int(groups[number])], times)
            found = runs(groups, order)
            assert all(found[group] <= times for group, times in most.items())
            whole += sum(times == 1 for times in found.values())
            broken += sum(times > 1 for times in runs(groups, before).values())
        assert whole > 100 and broken > 20, "the plain plan broke no group"


def test_a_grouped_plan_goes_on_from_every_batch() -> None:
    groups = both_sources(9)
    walked = list(islice(plan_of(groups, 5, "global").walk(Position()), 80))
    for at in range(0, 79, 7):
        fresh = plan_of(groups, 5, "global")
        assert next(fresh.walk(walked[at].following)) == walked[at + 1]
    assert walked[-1].position.epoch == 2


def test_passes_over_a_grouped_source_differ_by_at_most_one() -> None:
    plan = plan_of(both_sources(2), 1, "global")
    seen: Counter[int] = Counter()
    for batch in plan.walk(Position()):
        if batch.position.epoch == 4:
            break
        seen.update(number for samples in batch.bins for number in samples)
    for first, last in ((0, 70), (70, 200)):
        counts = [seen[number] for number in range(first, last)]
        assert max(counts) - min(counts) <= 1 and min(counts) > 2
