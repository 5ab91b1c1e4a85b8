"""The plan by windows: compared with a slow reference that knows every shard beforehand."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import islice

import numpy as np
import pytest

from vlmpack.data.index.table import Int64s
from vlmpack.data.plan.batches import (
    Cursors,
    PlannedBatch,
    Position,
    draws_per_source,
    seeded_order,
    window_starts,
)
from vlmpack.data.plan.packers import FixedPacker
from vlmpack.data.plan.windows import PERIOD, StreamSource, WindowPlan
from vlmpack.errors import CheckpointError, EmptyDataError

WINDOW, WHOLE, MICRO, SEED = 64, 8, 3, 5


class FakeShards:
    """Shards with given numbers of usable samples; knows only those that were made."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = list(counts)
        self.made: list[int] = []
        self.ahead: list[int] = []

    def numbers(self, shard: int) -> Int64s:
        if shard not in self.made:
            self.made.append(shard)
        return np.arange(self.counts[shard], dtype=np.int64) + 1000 * shard

    def count(self, shard: int) -> int | None:
        return self.counts[shard] if shard in self.made else None

    def fingerprint(self, shard: int) -> bytes:
        return b"%d" % self.counts[shard]

    def next_window(self) -> None:
        pass

    def make(self, shards: Sequence[int]) -> None:
        for shard in shards:
            self.numbers(shard)

    def make_ahead(self, shards: Sequence[int]) -> None:
        self.ahead += [shard for shard in shards if shard not in self.made]


def plan_of(
    sources: Sequence[Sequence[int]],
    draws: Sequence[int | None] | None = None,
    *,
    window: int = WINDOW,
    seed: int = SEED,
    bytes_each: int = 10,
) -> WindowPlan:
    """Sources given by their shards' counts; a shard has `bytes_each` bytes a sample."""
    streams, first = [], 0
    for d, counts in enumerate(sources):
        sizes = tuple(max(1, count * bytes_each) for count in counts)
        streams.append(StreamSource(f"s{d}", first, sizes, draws[d] if draws else None))
        first += len(counts)
    shards = FakeShards([count for counts in sources for count in counts])
    return WindowPlan(streams, shards, seed=seed, window=window, packer=FixedPacker(WHOLE, MICRO))


def flat(batch: PlannedBatch) -> list[int]:
    return [number for samples in batch.bins for number in samples]


def epoch_of(plan: WindowPlan, epochs: int = 1) -> list[PlannedBatch]:
    """The batches of the first epochs."""
    found = []
    for batch in plan.walk(Position(), plan.start()):
        if batch.position.epoch == epochs:
            return found
        found.append(batch)
    raise AssertionError


def reference(
    sources: Sequence[Sequence[int]], draws: Sequence[int] | None, epochs: int
) -> list[list[int]]:
    """The rule, literally: lists of all samples first, then windows off their fronts.

    Returns the sample numbers of each global batch.
    """
    firsts = [sum(len(counts) for counts in sources[:d]) for d in range(len(sources))]

    def one_pass(d: int, number: int) -> list[int]:
        order = seeded_order(len(sources[d]), "shards", SEED, f"s{d}", number)
        return [
            1000 * (firsts[d] + int(place)) + row
            for place in order
            for row in range(sources[d][int(place)])
        ]

    sizes = [sum(max(1, count * 10) for count in counts) for counts in sources]
    passes = [0] * len(sources)
    queues: list[list[int]] = [[] for _ in sources]
    batches: list[list[int]] = []
    for epoch in range(epochs):
        if draws is None:
            queues = [one_pass(d, epoch) for d in range(len(sources))]
            starts = window_starts(draws_per_source(sizes, PERIOD * WINDOW), WINDOW)
        else:
            starts = window_starts(draws, WINDOW)
        w = 0
        while (w < len(starts) - 1) if draws is not None else any(queues):
            quotas = np.diff(starts, axis=0)[w if draws is not None else w % PERIOD].tolist()
            taken: list[list[int]] = [[] for _ in sources]
            wanted = quotas
            while True:
                for d, count in enumerate(wanted):
                    while draws is not None and len(queues[d]) < count:
                        queues[d] += one_pass(d, passes[d])
                        passes[d] += 1
                    taken[d] += queues[d][:count]
                    queues[d] = queues[d][count:]
                missing = sum(quotas) - sum(map(len, taken))
                rest = [d for d, queue in enumerate(queues) if queue]
                if not missing or not rest:
                    break
                shares = draws_per_source([sizes[d] for d in rest], missing)
                wanted = [dict(zip(rest, shares, strict=True)).get(d, 0) for d in range(len(sizes))]
            joined = [number for piece in taken for number in piece]
            order = seeded_order(len(joined), SEED, "window", epoch, w)
            mixed = [joined[int(place)] for place in order]
            batches += [mixed[at : at + WHOLE] for at in range(0, len(mixed), WHOLE)]
            w += 1
    return batches


def random_sources(seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [
        [int(n) for n in generator.integers(0, 60, int(generator.integers(1, 9)))] + [7]
        for _ in range(int(generator.integers(1, 5)))
    ]


@pytest.mark.parametrize("seed", range(12))
def test_every_sample_once_equals_the_reference(seed: int) -> None:
    sources = random_sources(seed)
    plan = plan_of(sources)
    expected = reference(sources, None, 3)
    walked = [flat(batch) for batch in epoch_of(plan, 3)]
    assert walked == expected
    total = sum(map(sum, sources))
    assert sum(map(len, walked)) == 3 * total > 0
    first = [n for batch in epoch_of(plan) for n in flat(batch)]
    everything = [1000 * s + row for s, n in enumerate(plan.shards.counts) for row in range(n)]  # type: ignore[attr-defined]
    assert sorted(first) == everything


@pytest.mark.parametrize("seed", range(12))
def test_weighted_equals_the_reference(seed: int) -> None:
    sources = random_sources(seed)
    generator = np.random.default_rng(100 + seed)
    draws = [int(n) for n in generator.integers(1, 200, len(sources))]
    walked = [flat(batch) for batch in epoch_of(plan_of(sources, draws), 3)]
    assert walked == reference(sources, draws, 3)
    owner = np.repeat(np.arange(len(sources)), [len(counts) for counts in sources])
    given = Counter(int(owner[n // 1000]) for batch in walked for n in batch)
    assert [given[d] for d in range(len(sources))] == [3 * count for count in draws]


def test_only_the_last_batch_of_an_epoch_is_short() -> None:
    sizes = [batch.num_samples for batch in epoch_of(plan_of([[30, 50, 70], [11]]))]
    assert sizes == [8] * 20 + [1]


def test_the_second_epoch_has_another_order() -> None:
    both = epoch_of(plan_of([[30, 50, 70, 20]]), 2)
    half = len(both) // 2
    assert [flat(b) for b in both[:half]] != [flat(b) for b in both[half:]]
    assert both[half].position == Position(1)


@pytest.mark.parametrize("draws", [None, (150, 40)])
def test_any_batch_is_planned_from_its_state_alone(draws: tuple[int, ...] | None) -> None:
    """At every batch: window and epoch edges, the last one; a fresh plan knows nothing before."""
    sources = [[30, 50, 0, 70, 20], [5, 40]]
    whole = epoch_of(plan_of(sources, draws), 3)
    cursors: Cursors = plan_of(sources, draws).start()
    position = Position()
    for at, batch in enumerate(whole):
        fresh = plan_of(sources, draws)
        rest = whole[at : at + 3]
        assert list(islice(fresh.walk(position, cursors), len(rest))) == rest
        position, cursors = batch.following, batch.cursors


def test_a_window_needs_its_own_shards_only() -> None:
    """100 shards of 50: a window of 64 takes at most three; one spare is known from the bytes."""
    plan = plan_of([[50] * 100])
    walk = plan.walk(Position(), plan.start())
    shards: FakeShards = plan.shards  # type: ignore[assignment]
    assert next(walk).num_samples == WHOLE
    assert len(shards.made) == 2 and not shards.ahead, "the first batch waits for its window alone"
    next(walk)
    assert 1 <= len(shards.ahead) <= 2 and not set(shards.ahead) & set(shards.made)
    late = plan_of([[50] * 100])
    walked = list(islice(late.walk(Position(), late.start()), 5 * WINDOW // WHOLE))
    resumed = plan_of([[50] * 100])
    next(resumed.walk(walked[-1].following, walked[-1].cursors))
    assert len(resumed.shards.made) <= 3, "what came before was indexed again"  # type: ignore[attr-defined]


def test_what_is_known_has_no_part_in_it() -> None:
    sources = [[30, 50, 70, 20], [5, 40]]
    known = plan_of(sources)
    known.shards.make(range(6))
    assert epoch_of(known, 2) == epoch_of(plan_of(sources), 2)


def test_a_source_that_runs_out_is_filled_up_by_the_others() -> None:
    """Source 1 has many bytes and few samples: it ends early, and no batch is short for it."""
    plan = plan_of([[100, 100], [10]])
    plan._bytes[1] = plan._bytes[0]
    sizes = [batch.num_samples for batch in epoch_of(plan)]
    assert sizes == [8] * 26 + [2]


def test_sources_share_windows_by_their_bytes() -> None:
    batches = epoch_of(plan_of([[300, 300], [200]]))
    per_window = Counter(
        (batch.position.window, number // 1000 == 2) for batch in batches for number in flat(batch)
    )
    assert all(per_window[w, True] == WINDOW // 4 for w in range(800 // WINDOW))


def test_an_empty_shard_and_an_empty_end_change_nothing() -> None:
    """Shards of over-long samples only: met, found empty, and passed."""
    batches = epoch_of(plan_of([[0, 40, 0, 24, 0]]), 2)
    assert [batch.num_samples for batch in batches] == [8] * 16
    assert {batch.position.epoch for batch in batches} == {0, 1}


@pytest.mark.parametrize("sources", [[[64, 0, 0, 0]], [[96, 0], [0, 32, 0]], [[0, 70, 58, 0]]])
def test_an_epoch_that_fills_its_last_window_ends_with_it(sources: list[list[int]]) -> None:
    """Whatever shards without a sample come behind: no window is left that holds nothing."""
    num_windows = sum(map(sum, sources)) // WINDOW
    met = 0
    for seed in range(12):
        plan = plan_of(sources, seed=seed)
        met += any(plan.shards.counts[plan.shard_order(s, 0)[-1]] == 0 for s in plan.sources)  # type: ignore[attr-defined]
        both = epoch_of(plan, 2)
        last = [batch for batch in both if batch.following.epoch > batch.position.epoch]
        assert [batch.position.window for batch in last] == [num_windows - 1] * 2
        assert len(both) == 2 * num_windows * WINDOW // WHOLE
        for batch in both:
            after = batch.following
            assert plan_of(sources, seed=seed).packed(after, batch.cursors)
    assert met > 3, "guard: an empty shard stood at the end of a pass"


def test_at_a_shards_edge_one_more_is_read_to_see_whether_the_epoch_ends() -> None:
    plan = plan_of([[WINDOW] * 10])
    next(plan.walk(Position(), plan.start()))
    assert len(plan.shards.made) == 2  # type: ignore[attr-defined]
    plan = plan_of([[WINDOW // 2] * 10, [WINDOW] * 10])
    next(plan.walk(Position(), plan.start()))
    assert len(plan.shards.made) <= 3, "another source stands inside a shard"  # type: ignore[attr-defined]


def test_no_usable_sample_is_an_error_and_no_hang() -> None:
    with pytest.raises(EmptyDataError, match="no usable sample"):
        next(plan_of([[0, 0]]).walk(Position(), ((0, 0, 0),)))
    plan = plan_of([[0, 0], [9]], [5, 5])
    with pytest.raises(EmptyDataError, match="s0: no usable sample in its 2 shards"):
        next(plan.walk(Position(), plan.start()))


@pytest.mark.parametrize("cursors", [(), (3,), ((0, 9, 0),), ((0, 0, 0), (0, 0, 0))])
def test_cursors_of_another_plan_are_refused(cursors: Cursors) -> None:
    with pytest.raises(CheckpointError, match="do not fit the 1 sources"):
        next(plan_of([[5, 5]]).walk(Position(), cursors))


def test_a_batch_behind_its_window_is_refused() -> None:
    plan = plan_of([[40]])
    with pytest.raises(CheckpointError, match="batch 7 of shuffle window 0, which has 5"):
        next(plan.walk(Position(0, 0, 7), plan.start()))


GOLDEN = "de442635f5401299"


def test_plan_hash_is_pinned() -> None:
    """Guards against a change of numpy, python or the rule that would reorder running jobs."""
    digest = hashlib.blake2b(digest_size=8)
    for draws in (None, (120, 40)):
        for batch in epoch_of(plan_of([[30, 50, 70, 20], [5, 40]], draws), 3):
            digest.update(repr((batch.position, batch.bins, batch.cursors)).encode())
    assert digest.hexdigest() == GOLDEN
