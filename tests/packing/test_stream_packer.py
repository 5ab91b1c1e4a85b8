"""`StreamPacker`: nearly full packs from a stream, nobody waits for long, no bound is broken."""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
from support.lengths import mixed_lengths

from vlmpack.errors import PackingError
from vlmpack.packing import StreamPacker, plan_packs, stream
from vlmpack.packing.budget import RowBudget
from vlmpack.packing.stream import bounded, buffer_for, fullest


def packed(lengths, capacity, second=None, **options):
    """Packs that became ready while pushing, those of the flush, and the pushes before each."""
    packer = StreamPacker(capacity, **options)
    ready, pushes = [], []
    for number, length in enumerate(lengths):
        for pack in packer.push(length, 0 if second is None else second[number]):
            ready.append(pack)
            pushes.append(number)
    return ready, packer.flush(), pushes


def fill(packs, lengths, capacity, alignment=1):
    rounded = -(-np.asarray(lengths) // alignment) * alignment
    return sum(int(rounded[pack].sum()) for pack in packs) / (capacity * len(packs))


@pytest.mark.parametrize("capacity", [4096, 8192, 16384])
@pytest.mark.parametrize("alignment", [1, 8])
def test_packs_of_a_mixed_stream_are_995_per_mille_full(capacity, alignment):
    lengths, _ = mixed_lengths(20_000, capacity)
    ready, last, _ = packed(lengths.tolist(), capacity, alignment=alignment)
    assert sorted(itertools.chain(*ready, *last)) == list(range(20_000))
    assert fill(ready, lengths, capacity, alignment) >= 0.995
    assert fill(ready, lengths, capacity) >= 0.995, "of real tokens too"
    assert max(map(len, ready)) <= 31
    assert next_fit_fill(lengths.tolist(), capacity) < 0.95, "the mix is not an easy one"


def next_fit_fill(lengths, capacity):
    packs, used = 1, 0
    for length in lengths:
        if used + length > capacity:
            packs, used = packs + 1, 0
        used += length
    return sum(lengths) / (packs * capacity)


@pytest.mark.parametrize("seed", range(30))
def test_the_sum_is_the_best_there_is(seed):
    """Against every subset, one by one."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 60) for _ in range(rng.randint(0, 10))]
    room = rng.randint(0, 150)
    chosen = fullest(room, lengths)
    assert chosen == sorted(set(chosen))
    best = max(
        sum(subset)
        for size in range(len(lengths) + 1)
        for subset in itertools.combinations(lengths, size)
        if sum(subset) <= room
    )
    assert sum(lengths[i] for i in chosen) == best


def test_among_equal_sums_the_oldest_leave():
    assert fullest(10, [5, 5, 10, 5, 5]) == [0, 1]
    assert fullest(10, [3, 4, 6, 7]) == [1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_every_pack_holds_the_oldest_and_is_as_full_as_can_be(seed):
    """The packer's own state replayed in plain Python, with sets of reachable sums."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 100) for _ in range(200)]
    ready, last, pushes = packed(lengths, 100, buffer_size=8)
    gone: set[int] = set()
    for pack, newest in zip([*ready, *last], [*pushes, *[199] * len(last)], strict=True):
        waiting = [number for number in range(newest + 1) if number not in gone]
        assert len(waiting) <= 8
        assert pack[0] == waiting[0]
        sums = {lengths[waiting[0]]}
        for number in waiting[1:]:
            sums |= {total + lengths[number] for total in sums}
        assert sum(lengths[n] for n in pack) == max(total for total in sums if total <= 100)
        assert pack == sorted(pack)
        gone.update(pack)
    assert len(ready) > 20
    assert gone == set(range(200))


def longest_wait(ready, last, pushes):
    """Packs made from a sample's push to its own pack, both included, at most over samples."""
    wait = 0
    for number, pack in enumerate([*ready, *last]):
        for sample in pack:
            before = sum(pushed < sample for pushed in pushes)
            wait = max(wait, number - before + 1)
    return wait


@pytest.mark.parametrize("buffer_size", [1, 2, 16, 64])
def test_nobody_waits_for_more_packs_than_the_buffer_holds(buffer_size):
    lengths, _ = mixed_lengths(1000, 8192, seed=3)
    waits = longest_wait(*packed(lengths.tolist(), 8192, buffer_size=buffer_size))
    assert 1 <= waits <= buffer_size


def test_the_bound_on_waiting_is_reached_by_what_never_fits_with_others():
    """Samples that fill a pack each leave one by one, in order: the last of 16 waits for 16."""
    ready, last, pushes = packed([100] * 40, 100, buffer_size=16)
    assert [*ready, *last] == [[number] for number in range(40)]
    assert longest_wait(ready, last, pushes) == 16


@pytest.mark.parametrize("budget", [20_000, 12_288])
@pytest.mark.parametrize("most", [None, 6])
def test_bounds_are_never_broken(budget, most):
    lengths, patches = mixed_lengths(4000, 8192, seed=1)
    patches = np.minimum(patches, budget)
    options = {"second_budget": budget, "max_sequences": most, "alignment": 8}
    ready, last, _ = packed(lengths.tolist(), 8192, patches.tolist(), **options)
    assert sorted(itertools.chain(*ready, *last)) == list(range(4000))
    rounded = -(-lengths // 8) * 8
    for pack in [*ready, *last]:
        assert rounded[pack].sum() <= 8192
        assert patches[pack].sum() <= budget
        assert most is None or len(pack) <= most
    free, _, _ = packed(lengths.tolist(), 8192, alignment=8)
    assert any(patches[pack].sum() > budget for pack in free), "the budget binds"
    assert any(len(pack) > 6 for pack in free), "the number of sequences binds"


def test_the_scarcer_budget_is_the_one_that_is_filled():
    lengths, patches = mixed_lengths(10_000, 8192, seed=2)
    patches = np.minimum(patches, 16_384)
    ready, _, _ = packed(lengths.tolist(), 8192, patches.tolist(), second_budget=16_384)
    assert patches.sum() / 16_384 > lengths.sum() / 8192, "vision is the scarcer"
    assert sum(patches[pack].sum() for pack in ready) / (16_384 * len(ready)) > 0.97


def test_a_bound_on_sequences_takes_the_longer_samples():
    assert bounded(range(5), [1, 2, 3, 4, 5], 100, None, 0, 2) == [3, 4]
    packs, last, _ = packed([50] * 10 + [1] * 200, 100, max_sequences=4, buffer_size=32)
    assert max(map(len, [*packs, *last])) == 4


def test_set_aside_by_the_second_quantity():
    assert bounded(range(3), [6, 4, 4], 10, [9, 9, 1], 10, 3) == [0, 2]
    assert bounded([1, 2], [9, 5, 5], 10, [0, 3, 3], 2, 9) == []


def test_packs_are_a_function_of_the_pushes_alone():
    lengths, patches = mixed_lengths(1500, 4096)
    pushes = list(zip(lengths.tolist(), patches.tolist(), strict=True))
    runs = []
    for kind in (int, np.int64):
        packer = StreamPacker(4096, second_budget=12_288, max_sequences=8)
        packs = []
        for at, (length, second) in enumerate(pushes):
            if at == 700:
                packer = pickle.loads(pickle.dumps(packer))
            packs += packer.push(kind(length), kind(second))
        runs.append(packs + packer.flush())
    assert runs[0] == runs[1]
    assert all(type(number) is int for pack in runs[1] for number in pack)


def test_a_flush_empties_the_packer_and_numbers_go_on():
    packer = StreamPacker(10, buffer_size=4)
    assert packer.push(6) == []
    assert packer.push(5) == []
    assert packer.flush() == [[0], [1]]
    assert packer.flush() == []
    assert packer.push(4) == []
    assert packer.flush() == [[2]]


def test_lengths_are_rounded_up_to_the_alignment():
    packer = StreamPacker(20, buffer_size=2, alignment=8)
    assert packer.push(8) == []
    assert packer.push(9) == [[0]], "8 + 16 is more than the two units of 8 that fit"
    with pytest.raises(PackingError, match=r"sample 2: length is 17 \(24 at alignment 8\)"):
        packer.push(17)
    assert packer.flush() == [[1]], "a refused sample is not added"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity is 0, expected an integer of at least 1"),
        ({"capacity": 8.5}, "capacity is 8.5"),
        ({"capacity": 8, "buffer_size": 0}, "buffer_size is 0"),
        ({"capacity": 8, "alignment": -1}, "alignment is -1"),
        ({"capacity": 8, "alignment": 16}, "capacity is 8, below alignment 16"),
        ({"capacity": 8, "second_budget": 0}, "second_budget is 0"),
        ({"capacity": 8, "max_sequences": True}, "max_sequences is True"),
    ],
)
def test_bad_bounds_are_named(arguments, message):
    with pytest.raises(PackingError, match=message):
        StreamPacker(arguments.pop("capacity"), **arguments)


@pytest.mark.parametrize(
    ("push", "message"),
    [
        ((0,), "sample 0: length is 0"),
        ((-3,), "length is -3"),
        ((2.5,), "length is 2.5"),
        ((9,), "length is 9, above capacity 8"),
        ((4, -1), "second is -1"),
        ((4, 6), "second is 6, above second_budget 5"),
    ],
)
def test_bad_samples_are_named(push, message):
    packer = StreamPacker(8, second_budget=5)
    with pytest.raises(PackingError, match=message):
        packer.push(*push)
    assert packer.flush() == []


def short_lengths(count=20_000, mean=63):
    drawn = np.random.default_rng(mean).exponential(mean, count)
    return np.clip(drawn, 1, 8192).astype(np.int64)


def test_the_buffer_holds_two_packs_of_mean_samples():
    for length, wanted in ((8192, 64), (256, 64), (255, 65), (63, 261), (2, 8192), (1, 8192)):
        assert buffer_for(np.full(100, length), 8192) == wanted
    assert buffer_for(np.asarray([1, 99]), 8192) == 328, "of the mean, which is 50"
    assert buffer_for(np.zeros(0, np.int64), 8192) == 64
    aligned = RowBudget(max_tokens=8192, alignment=8)
    assert aligned.waiting(np.full(100, 63)) == 256, "a length counts as 64"
    assert replace(aligned, buffer=64).waiting(np.full(100, 63)) == 64


@pytest.mark.parametrize("name", ["equal", "drawn"])
@pytest.mark.parametrize(("most", "least"), [(None, 0.99), (256, 0.98)])
def test_rows_of_short_samples_are_full(name, most, least):
    lengths = np.full(20_000, 63) if name == "equal" else short_lengths()
    none = np.zeros_like(lengths)
    budget = RowBudget(max_tokens=8192, max_sequences=most)
    rows = budget.rows(lengths, none)
    assert sorted(itertools.chain(*rows)) == list(range(20_000))
    assert max(int(lengths[row].sum()) for row in rows) <= 8192
    assert max(map(len, rows)) <= (most or 20_000)
    assert fill(rows, lengths, 8192) >= least
    before = replace(budget, buffer=64).rows(lengths, none)
    assert max(map(len, before)) == 64 and fill(before, lengths, 8192) < 0.5


def test_a_bound_on_sequences_is_reached_where_it_binds():
    lengths = short_lengths()
    rows = RowBudget(max_tokens=8192, max_sequences=100).rows(lengths, np.zeros_like(lengths))
    assert [len(row) for row in rows[:-3]] == [100] * (len(rows) - 3)
    assert len(rows) <= 1.01 * 20_000 / 100


@pytest.mark.parametrize("most", [128, 136, 256])
def test_best_fit_decreasing_reaches_the_bound_on_sequences(most):
    lengths = short_lengths()
    packs = plan_packs(lengths, 8192, max_sequences=most)
    least = max(lengths.sum() / 8192, 20_000 / most)
    assert max(map(len, packs)) <= most
    assert len(packs) <= 1.02 * least


@pytest.mark.parametrize("budget", [2000, 20_000])
@pytest.mark.parametrize("most", [None, 100])
def test_bounds_hold_and_nobody_waits_for_long_in_a_large_buffer(budget, most):
    lengths = short_lengths(6000)
    second = np.where(np.arange(6000) % 5 == 0, 4 * np.minimum(lengths, 500), 0)
    size = buffer_for(lengths, 8192)
    assert size > 250
    options = {"second_budget": budget, "max_sequences": most, "buffer_size": size}
    ready, last, pushes = packed(lengths.tolist(), 8192, second.tolist(), **options)
    assert sorted(itertools.chain(*ready, *last)) == list(range(6000))
    assert longest_wait(ready, last, [*pushes, *[5999] * len(last)]) <= size
    gone: set[int] = set()
    for pack in [*ready, *last]:
        assert pack == sorted(pack) and pack[0] == min(set(range(6000)) - gone), "the oldest"
        assert lengths[pack].sum() <= 8192 and second[pack].sum() <= budget
        assert len(pack) <= (most or 6000)
        gone.update(pack)
    plain = np.maximum(lengths.sum() / 8192, second.sum() / budget)
    assert len(gone) == 6000 and len([*ready, *last]) <= 1.1 * max(plain, 6000 / (most or 6000))


def test_patches_that_hardly_bind_leave_rows_full():
    """A few images take the patches of a row each, and more text waits than 64 samples hold."""
    is_image = np.random.default_rng(0).random(20_000) < 0.004
    lengths, patches = np.where(is_image, 1000, 40), np.where(is_image, 4000, 0)
    rows = RowBudget(max_tokens=8192, max_patches=8000).rows(lengths, patches)
    assert fill(rows, lengths, 8192) >= 0.98


def test_sums_are_exact_over_few_samples_in_any_buffer(monkeypatch):
    """The same mechanism, not the same time: what a search costs does not grow with the buffer."""
    offered = []

    def counted(room, lengths):
        offered.append(len(lengths))
        return fullest(room, lengths)

    monkeypatch.setattr(stream, "fullest", counted)
    lengths = short_lengths(20_000, mean=8)
    for most in (None, 600, 8):
        rows = RowBudget(max_tokens=8192, max_sequences=most).rows(lengths, np.zeros_like(lengths))
        assert max(offered) <= 64
        assert len(offered) <= 8 * len(rows)


ROWS_BEFORE = {
    (None, None, 1): ("eab91bf9dce06f3d", "8cd6714572b9f04b"),
    (16_384, None, 1): ("e399b252222a6e98", "e208725e22032e05"),
    (None, 8, 8): ("9be2df3ee30b2401", "1f13fda8b8ec85e7"),
    (16_384, 6, 8): ("5441adff9dcd55d9", "5441adff9dcd55d9"),
}
"""Rows and packs of the version whose buffer was always 64, by bounds."""


@pytest.mark.parametrize("bounds", ROWS_BEFORE)
def test_what_needs_64_is_what_it_was(bounds):
    lengths, patches = mixed_lengths(3000, 8192, seed=5)
    patches = np.minimum(patches, 16_384)
    most_patches, most, alignment = bounds
    budget = RowBudget(
        max_tokens=8192, max_patches=most_patches, max_sequences=most, alignment=alignment
    )
    assert budget.waiting(lengths) == 64
    for found, before in zip(
        (budget.rows(lengths, patches), budget.packs(lengths, patches)),
        ROWS_BEFORE[bounds],
        strict=True,
    ):
        text = json.dumps([[int(number) for number in row] for row in found])
        assert hashlib.blake2b(text.encode(), digest_size=8).hexdigest() == before
