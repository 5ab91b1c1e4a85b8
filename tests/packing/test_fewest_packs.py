"""`plan_packs` makes no more packs than best-fit-decreasing or the stream packer, and looks no
further where there can be no fewer."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from support.lengths import mixed_lengths

from vlmpack.packing import StreamPacker, offline, plan_packs
from vlmpack.packing.limits import PackLimits, fewest_packs
from vlmpack.packing.offline import place_lengths, place_pairs

COUNT = 4000


def lognormal(seed, median, sigma, capacity):
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, COUNT)
    return np.clip(drawn, 1, capacity).astype(np.int64)


def pictures(seed, share, image, text):
    """Images of some tokens and four patches to each, among texts; both uniform."""
    random = np.random.default_rng(seed)
    is_image = random.random(COUNT) < share
    tokens = np.where(is_image, random.integers(*image, COUNT), random.integers(*text, COUNT))
    return tokens, np.where(is_image, 4 * tokens, 0)


def mixes():
    """Name -> (lengths, second, capacity, second budget)."""
    found = {}
    for capacity, budget in ((4096, 16_384), (8192, 32_768), (16_384, 65_536)):
        tokens, patches = mixed_lengths(COUNT, capacity)
        found[f"mixed into {capacity}"] = (tokens, patches, capacity, budget)
    tokens, patches = mixed_lengths(COUNT, 8192, seed=1)
    found["patches bind"] = (tokens, np.minimum(patches, 16_384), 8192, 16_384)
    for median, sigma in ((400, 0.9), (1000, 0.8), (2500, 0.6)):
        tokens = lognormal(median, median, sigma, 8192)
        found[f"lognormal {median}"] = (tokens, np.minimum(tokens * 2, 8192), 8192, 12_000)
    tokens, patches = pictures(32, 0.57, (422, 1562), (2634, 3608))
    found["images are short"] = (tokens, patches, 8192, 8192)
    tokens, patches = pictures(22, 0.23, (241, 2960), (2313, 4530))
    found["images are long"] = (tokens, np.minimum(patches, 8192), 8192, 8192)
    tokens = np.random.default_rng(1).integers(2500, 4200, COUNT)
    found["two to a pack"] = (tokens, tokens // 2, 8192, 8192)
    return found


MIXES = mixes()


def stream(lengths, capacity, second, budget):
    packer = StreamPacker(capacity, second_budget=budget)
    pairs = zip(lengths.tolist(), second.tolist(), strict=True)
    packs = [pack for pair in pairs for pack in packer.push(*pair)]
    return len(packs + packer.flush())


def counts(name, budgets):
    """Packs by best-fit-decreasing, by the stream packer and by plan_packs; packs are checked."""
    lengths, second, capacity, budget = MIXES[name]
    if budgets == 1:
        best_fit = place_lengths(lengths, capacity, COUNT)
        packs = plan_packs(lengths, capacity)
        streamed = stream(lengths, capacity, np.zeros_like(second), None)
    else:
        limits = PackLimits(capacity=capacity, second_budget=budget)
        best_fit = place_pairs(lengths, second, limits, COUNT)
        packs = plan_packs(lengths, capacity, second=second, second_budget=budget)
        streamed = stream(lengths, capacity, second, budget)
        assert max(int(second[pack].sum()) for pack in packs) <= budget
    assert np.array_equal(np.sort(np.concatenate(packs)), np.arange(COUNT))
    assert max(int(lengths[pack].sum()) for pack in packs) <= capacity
    return int(best_fit.max()) + 1, streamed, len(packs)


@pytest.mark.cases(slow="1")
@pytest.mark.parametrize("budgets", [1, 2])
def test_no_more_packs_than_best_fit_or_the_stream_packer(budgets):
    assert len(MIXES) == 10
    found = {name: counts(name, budgets) for name in MIXES}
    for name, (best_fit, streamed, planned) in found.items():
        assert planned <= min(best_fit, streamed), name
    assert any(streamed < best_fit for best_fit, streamed, _ in found.values())
    assert any(best_fit < streamed for best_fit, streamed, _ in found.values())


def test_a_second_budget_that_never_binds_costs_no_pack():
    lengths, _, capacity, _ = MIXES["images are short"]
    second = np.where(lengths < 1562, 4 * lengths, 0)
    limits = PackLimits(capacity=capacity, second_budget=4 * capacity)
    plain = [pack.tolist() for pack in plan_packs(lengths, capacity)]
    planned = plan_packs(lengths, capacity, second=second, second_budget=4 * capacity)
    assert [pack.tolist() for pack in planned] == plain
    by_share = int(place_pairs(lengths, second, limits, COUNT).max()) + 1
    assert by_share >= len(plain)


def test_a_second_budget_that_few_packs_break_costs_few():
    lengths, second, capacity, _ = MIXES["images are long"]
    budget = 14_000
    plain = place_lengths(lengths, capacity, COUNT)
    over = int((np.bincount(plain, weights=second) > budget).sum())
    by_share = place_pairs(
        lengths, second, PackLimits(capacity=capacity, second_budget=budget), COUNT
    )
    planned = plan_packs(lengths, capacity, second=second, second_budget=budget)
    assert 20 < over < 100
    assert by_share.max() > 1.05 * plain.max(), "there is something to save"
    assert max(int(second[pack].sum()) for pack in planned) <= budget
    assert len(planned) < stream(lengths, capacity, second, budget)
    assert len(planned) <= 1.005 * (plain.max() + 1)


@pytest.mark.parametrize("budgets", [1, 2])
def test_nothing_else_is_tried_where_there_can_be_no_fewer(monkeypatch, budgets):
    """The same mechanism, not the same time: neither other packer is called."""
    lengths, second, capacity, budget = MIXES["mixed into 16384"]
    options = {"second": second, "second_budget": budget} if budgets == 2 else {}
    limits = PackLimits(capacity=capacity)
    bound = fewest_packs(lengths, None, limits)
    assert int(place_lengths(lengths, capacity, COUNT).max()) + 1 == bound
    monkeypatch.setattr(offline, "StreamPacker", None)
    monkeypatch.setattr(offline, "place_pairs", None)
    assert len(plan_packs(lengths, capacity, **options)) == bound
    lengths, second, capacity, _ = MIXES["two to a pack"]
    with pytest.raises(TypeError, match="not callable"):
        plan_packs(lengths, capacity)


def test_the_stream_packer_stops_where_it_can_no_longer_win(monkeypatch):
    lengths, _, capacity, _ = MIXES["lognormal 2500"]
    pushed = []

    class Counted(StreamPacker):
        def packs(self, units, second):
            return super().packs((pushed.append(unit) or unit for unit in units), second)

    monkeypatch.setattr(offline, "StreamPacker", Counted)
    limits = PackLimits(capacity=capacity)
    packs = offline._streamed(lengths, None, limits, most=COUNT, waiting=64)
    made = int(packs.max()) + 1
    assert len(pushed) == COUNT
    again = offline._streamed(lengths, None, limits, most=made, waiting=64)
    assert np.array_equal(packs, again)
    pushed.clear()
    least = fewest_packs(lengths, None, limits)
    assert least < made - 1
    assert offline._streamed(lengths, None, limits, most=made - 1, waiting=64) is None
    pushed.clear()
    assert offline._streamed(lengths, None, limits, most=least, waiting=64) is None
    assert len(pushed) < COUNT // 2


def short_lengths(count=50_000):
    drawn = 16 + np.random.default_rng(0).exponential(47, count)
    return np.minimum(drawn, 8192).astype(np.int64)


def test_short_samples_are_not_looked_at_again_for_a_hundredth(monkeypatch):
    """The same mechanism, not the same time: a second look costs ten times the plan."""
    monkeypatch.setattr(offline, "StreamPacker", None)
    lengths = np.full(500_000, 63)
    least = fewest_packs(lengths, None, PackLimits(capacity=8192))
    best_fit = int(place_lengths(lengths, 8192, 500_000).max()) + 1
    assert least < len(plan_packs(lengths, 8192)) == best_fit <= 1.01 * least
    with pytest.raises(TypeError, match="not callable"):
        plan_packs(short_lengths(), 8192, max_sequences=256)


def test_few_short_samples_are_packed_anew_where_sequences_bind(monkeypatch):
    lengths, anew = short_lengths(), []

    class Counted(StreamPacker):
        def packs(self, units, second):
            anew.append(len(units))
            return super().packs(units, second)

    monkeypatch.setattr(offline, "StreamPacker", Counted)
    bounds = PackLimits(capacity=8192, max_sequences=256)
    least = fewest_packs(lengths, None, bounds)
    assert int(place_lengths(lengths, 8192, 256).max()) + 1 > 1.03 * least
    packs = plan_packs(lengths, 8192, max_sequences=256)
    assert len(packs) <= 1.01 * least and max(map(len, packs)) <= 256
    assert np.array_equal(np.sort(np.concatenate(packs)), np.arange(50_000))
    assert len(anew) == 1 and anew[0] < 50_000 // 2


@pytest.mark.parametrize("most", [None, 100, 256])
@pytest.mark.parametrize("budget", [2000, 16_384])
def test_short_samples_keep_every_bound(most, budget):
    lengths = short_lengths(5000)
    patches = np.where(np.arange(5000) % 50 == 0, 4 * lengths, 0)
    budgets = {"second": patches, "second_budget": budget, "max_sequences": most}
    packs = plan_packs(lengths, 8192, **budgets)
    assert np.array_equal(np.sort(np.concatenate(packs)), np.arange(5000))
    assert max(int(lengths[pack].sum()) for pack in packs) <= 8192
    assert max(int(patches[pack].sum()) for pack in packs) <= budget
    assert most is None or max(map(len, packs)) <= most
    limits = PackLimits(capacity=8192, second_budget=budget, max_sequences=most)
    assert len(packs) <= 1.05 * fewest_packs(lengths, patches, limits)


def fewest_by_trial(sizes, capacity):
    """The fewest packs, by trying every sample in every pack."""
    best = len(sizes)
    for places in product(range(len(sizes)), repeat=len(sizes) - 1):
        loads = [0] * len(sizes)
        for size, place in zip(sizes, (0, *places), strict=True):
            loads[place] += size
        if max(loads) <= capacity:
            best = min(best, sum(load > 0 for load in loads))
    return best


def test_the_lower_bound_is_one_and_sees_more_than_the_sum():
    random = np.random.default_rng(0)
    tight = beyond = 0
    for _ in range(60):
        capacity = int(random.integers(5, 30))
        sizes = random.integers(capacity // 4 + 1, capacity + 1, size=5)
        bound = fewest_packs(sizes, None, PackLimits(capacity=capacity))
        fewest = fewest_by_trial(sizes.tolist(), capacity)
        by_sum = -(-int(sizes.sum()) // capacity)
        assert by_sum <= bound <= fewest
        tight += bound == fewest
        beyond += bound > by_sum
    assert tight > 50
    assert beyond > 10


def test_the_lower_bound_knows_all_three_bounds():
    ones = np.ones(10, np.int64)
    limits = PackLimits(capacity=5, second_budget=4, max_sequences=3)
    assert fewest_packs(ones, None, PackLimits(capacity=5)) == 2
    assert fewest_packs(ones, None, limits) == 4
    assert fewest_packs(ones, 3 * ones, limits) == 10
    huge = PackLimits(capacity=5, second_budget=2**62)
    assert fewest_packs(ones, np.full(10, 2**60), huge) == 3
