"""`plan_packs`: every sample once, nothing over a bound, best-fit-decreasing or better."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.lengths import mixed_lengths

from vlmpack.errors import PackingError
from vlmpack.packing import plan_packs
from vlmpack.packing.limits import PackLimits
from vlmpack.packing.offline import best_fit_decreasing, place_lengths, place_pairs


def plain_best_fit_decreasing(lengths, capacity):
    """Loads of the packs: each sample, longest first, into the fullest pack that holds it."""
    loads: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [load for load in loads if load + length <= capacity]
        if fits:
            loads.remove(max(fits))
        loads.append((max(fits) if fits else 0) + length)
    return sorted(loads)


def plain_with_second(lengths, second, capacity, budget):
    """The same with two budgets, each sample by its larger share of one."""
    order = sorted(
        range(len(lengths)),
        key=lambda i: (
            max(lengths[i] * budget, second[i] * capacity),
            lengths[i],
            second[i],
        ),
        reverse=True,
    )
    loads: list[tuple[int, int]] = []
    for i in order:
        fits = [
            load
            for load in loads
            if load[0] + lengths[i] <= capacity and load[1] + second[i] <= budget
        ]
        if fits:
            loads.remove(max(fits))
        best = max(fits) if fits else (0, 0)
        loads.append((best[0] + lengths[i], best[1] + second[i]))
    return sorted(loads)


def each_once(packs, count):
    return np.array_equal(np.sort(np.concatenate(packs)), np.arange(count))


@pytest.mark.parametrize("seed", range(25))
def test_the_histogram_gives_the_packs_of_the_plain_rule(seed):
    random = np.random.default_rng(seed)
    capacity = int(random.integers(10, 400))
    lengths = random.integers(1, random.integers(2, capacity + 1), size=300)
    packs = place_lengths(lengths, capacity, 300)
    loads = np.bincount(packs, weights=lengths).astype(int)
    assert sorted(loads.tolist()) == plain_best_fit_decreasing(lengths.tolist(), capacity)
    assert 1 < len(loads) < 300


@pytest.mark.parametrize("seed", range(25))
def test_two_budgets_give_the_packs_of_the_plain_rule(seed):
    random = np.random.default_rng(seed)
    capacity, budget = int(random.integers(20, 200)), int(random.integers(5, 200))
    lengths = random.integers(1, capacity // 2, size=200)
    second = np.where(random.random(200) < 0.5, 0, random.integers(0, budget + 1, size=200))
    packs = place_pairs(lengths, second, PackLimits(capacity=capacity, second_budget=budget), 200)
    loads = zip(
        np.bincount(packs, weights=lengths).astype(int).tolist(),
        np.bincount(packs, weights=second).astype(int).tolist(),
        strict=True,
    )
    expected = plain_with_second(lengths.tolist(), second.tolist(), capacity, budget)
    assert sorted(loads) == expected


@pytest.mark.parametrize(
    ("median", "sigma"),
    [
        (250, 0.9),
        (512, 0.8),
        pytest.param(665, 1.0, marks=pytest.mark.slow),
        pytest.param(1000, 1.0, marks=pytest.mark.slow),
    ],
)
def test_lognormal_lengths_take_one_pack_above_the_bound_at_most(median, sigma):
    random = np.random.default_rng(7)
    lengths = np.clip(random.lognormal(np.log(median), sigma, 200_000), 1, 8192).astype(np.int64)
    packs = plan_packs(lengths, 8192)
    assert each_once(packs, 200_000)
    assert max(int(lengths[pack].sum()) for pack in packs) <= 8192
    assert len(packs) <= -(-int(lengths.sum()) // 8192) + 1


@pytest.mark.parametrize("minimum", [1, pytest.param(16, marks=pytest.mark.slow)])
def test_a_million_lognormal_lengths(minimum):
    random = np.random.default_rng(0)
    drawn = random.lognormal(np.log(400), 0.9, 1_000_000)
    lengths = np.clip(drawn, minimum, 8192).astype(np.int64)
    packs = plan_packs(lengths, 8192)
    assert each_once(packs, 1_000_000)
    assert len(packs) <= -(-int(lengths.sum()) // 8192) + 1


def test_packing_anew_saves_what_best_fit_decreasing_left():
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(1000), 0.8, 100_000), 1, 8192).astype(np.int64)
    before = int(place_lengths(lengths, 8192, len(lengths)).max()) + 1
    least = -(-int(lengths.sum()) // 8192)
    assert before > least + 2, "there is something to save"
    assert len(plan_packs(lengths, 8192)) <= least + 1


def test_wikipedia_at_512_tokens():
    """The histogram of Krell et al.; they report 50.0% unpacked and 99.95% for best fit."""
    file = Path(__file__).parent / "wikipedia_512.json"
    counts = np.array(json.loads(file.read_text())["counts"])
    lengths = np.arange(1, 513)
    tokens = int((counts * lengths).sum())
    assert int(counts.sum()) == 16_279_552
    assert tokens / (512 * counts.sum()) == pytest.approx(0.5, abs=2e-3)

    used = counts > 0
    rounds = best_fit_decreasing(
        lengths[used][::-1].tolist(), counts[used][::-1].tolist(), 512, 1 << 40
    )
    opened = max(first + number for first, number, _ in rounds)
    assert sum(number * each for _, number, each in rounds) == counts.sum()
    assert tokens / (512 * opened) >= 0.999

    some = np.repeat(lengths, counts // 64)
    packs = plan_packs(some, 512)
    assert each_once(packs, len(some))
    assert int(some.sum()) / (512 * len(packs)) >= 0.999


@pytest.mark.cases(quick=0.3, slow="*")
@pytest.mark.parametrize("alignment", [1, 8, 16])
@pytest.mark.parametrize("most", [None, 5, 16])
@pytest.mark.parametrize("budget", [None, 12_288])
def test_no_bound_is_broken(alignment, most, budget):
    lengths, patches = mixed_lengths(2000, 8192, seed=4)
    patches = np.minimum(patches, 12_288)
    options = {"alignment": alignment, "max_sequences": most}
    if budget is not None:
        options |= {"second": patches, "second_budget": budget}
    packs = plan_packs(lengths, 8192, **options)
    assert each_once(packs, 2000)
    rounded = -(-lengths // alignment) * alignment
    assert max(rounded[pack].sum() for pack in packs) <= 8192
    assert most is None or max(map(len, packs)) <= most
    assert budget is None or max(patches[pack].sum() for pack in packs) <= budget
    if most == 5 or budget is not None:
        assert len(packs) > len(plan_packs(lengths, 8192, alignment=alignment)), "the bound binds"


def test_a_bound_on_sequences_costs_little():
    """Best-fit-decreasing leaves the short samples for the end, where no pack of 16 is full."""
    lengths, _ = mixed_lengths(20_000, 16_384)
    least = -(-int(lengths.sum()) // 16_384)
    naive = int(place_lengths(lengths, 16_384, 16).max()) + 1
    assert naive > 1.1 * least
    assert len(plan_packs(lengths, 16_384, max_sequences=16)) <= 1.002 * least


def test_two_budgets_stay_near_the_larger_bound():
    lengths, patches = mixed_lengths(20_000, 8192)
    patches = np.minimum(patches, 16_384)
    packs = plan_packs(lengths, 8192, second=patches, second_budget=16_384)
    least = max(lengths.sum() / 8192, patches.sum() / 16_384)
    assert len(packs) <= 1.01 * least


@pytest.mark.slow
def test_the_plan_is_a_function_of_its_arguments():
    lengths, patches = mixed_lengths(3000, 4096)
    for options in ({}, {"second": patches, "second_budget": 16_384}, {"max_sequences": 3}):
        first = plan_packs(lengths, 4096, **options)
        again = plan_packs(lengths.astype(np.int32), np.int64(4096), **options)
        assert [pack.tolist() for pack in first] == [pack.tolist() for pack in again]
        assert all(pack.dtype == np.int64 and (np.diff(pack) > 0).all() for pack in first)
    assert [p.tolist() for p in plan_packs(lengths.tolist(), 4096)] == [
        p.tolist() for p in plan_packs(lengths, 4096)
    ]


def test_a_second_quantity_of_zero_changes_nothing():
    lengths, _ = mixed_lengths(1000, 4096)
    plain = plan_packs(lengths, 4096)
    zeros = plan_packs(lengths, 4096, second=np.zeros(1000, int), second_budget=1)
    assert [p.tolist() for p in plain] == [p.tolist() for p in zeros]


def test_small_plans():
    assert plan_packs([], 8) == []
    assert [p.tolist() for p in plan_packs([8], 8)] == [[0]]
    assert [p.tolist() for p in plan_packs([3, 5, 8, 5, 3], 8)] == [[2], [0, 1], [3, 4]]
    assert [p.tolist() for p in plan_packs([1, 1, 1], 8, max_sequences=2)] == [[0, 1], [2]]
    assert [p.tolist() for p in plan_packs([1, 9], 16, alignment=8)] == [[1], [0]]


def test_a_long_capacity_sorts_as_a_short_one_does():
    lengths = np.arange(1, 400) * 500
    packs = plan_packs(lengths, 200_000)
    assert each_once(packs, 399)
    assert [lengths[p].sum() for p in packs] == [
        500 * (np.arange(1, 400)[p]).sum() for p in plan_packs(np.arange(1, 400), 400)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([5, 9], 8), r"lengths\[1\] is 9, above capacity 8; drop or shorten"),
        (([5, 0], 8), r"lengths\[1\] is 0, expected at least 1"),
        (([5, -2], 8), r"lengths\[1\] is -2"),
        (([5.0], 8), r"lengths must be integers of shape \(n,\), found float64"),
        (([[5]], 8), r"found int64 of shape \(1, 1\)"),
        (([5], 0), "capacity is 0"),
    ],
)
def test_bad_lengths_are_named(arguments, message):
    with pytest.raises(PackingError, match=message):
        plan_packs(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alignment": 0}, "alignment is 0"),
        ({"alignment": 3}, r"lengths\[1\] is 8 \(9 at alignment 3\), above capacity 8"),
        ({"max_sequences": 0}, "max_sequences is 0"),
        ({"second": [1, 1]}, "second is given without its budget"),
        ({"second_budget": 4}, "second_budget is given without second"),
        ({"second": [1], "second_budget": 4}, "second has 1 values, expected 2"),
        ({"second": [1, 5], "second_budget": 4}, r"second\[1\] is 5, above second_budget 4"),
        ({"second": [-1, 0], "second_budget": 4}, r"second\[0\] is -1, expected at least 0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        plan_packs([5, 8], 8, **options)


@pytest.mark.parametrize("budget", [2**50, 2**62])
def test_a_second_budget_that_never_binds_may_be_huge(budget):
    lengths = np.random.default_rng(8).integers(1, 32768, 200)
    packs = plan_packs(lengths, 32768, second=lengths * 4, second_budget=budget)
    assert sorted(np.concatenate(packs).tolist()) == list(range(200))
    assert max(int(lengths[pack].sum()) for pack in packs) <= 32768
    alone = plan_packs(lengths, 32768)
    assert len(packs) <= len(alone) + 1


def test_second_quantities_that_cannot_be_counted_are_refused():
    with pytest.raises(PackingError, match=r"second_budget is .* in larger units"):
        plan_packs([1, 2], 32768, second=[2**50, 2**50], second_budget=2**51)
