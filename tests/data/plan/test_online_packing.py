"""Rows filled to a token budget: every sample once, none over budget, the same in any layout."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.shard_fakes import COUNT, key_of, open_data, sample_fields, write_shard

from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.batches import Position
from vlmpack.data.plan.packers import (
    BudgetPacker,
    window_samples,
)
from vlmpack.data.plan.rank_bins import Known, bin_costs, bins_by_rank, token_cost
from vlmpack.data.plan.state import DataState
from vlmpack.errors import DataError, RunIdentityError
from vlmpack.packing.budget import RowBudget, advised_max_sequences
from vlmpack.recipe.sources import Source

pytestmark = pytest.mark.usefixtures("few_rows")
BUDGET = RowBudget(max_tokens=64, alignment=4)


def online(folder: Path, index_dir: Path, **changes: Any) -> TrainData:
    values: dict[str, Any] = {
        "mode": "online",
        "budget": BUDGET,
        "micro_batch_size": 1,
        "global_batch_size": 3,
        "seq_length": 64,
    }
    return open_data(str(folder / "s-*.tar"), index_dir, **(values | changes))


def epoch_of(data: TrainData, epoch: int = 0, *, dp: int = 1) -> list[list[list[list[str]]]]:
    """keys[step][rank][micro-batch][sample] of one epoch."""
    start = data.start()
    steps = data.steps_until(epoch + 1, start)
    ranks = [list(data.batches(start, rank=r, dp=dp, max_steps=steps)) for r in range(dp)]
    found = []
    for shares in zip(*ranks, strict=True):
        assert len({len(share.micro_batches) for share in shares}) == 1, "unequal steps"
        if shares[0].epoch == epoch:
            found.append(
                [[[s.key for s in m.samples] for m in share.micro_batches] for share in shares]
            )
    return found


def rows_of(steps: list[list[list[list[str]]]]) -> list[set[str]]:
    return [set(row) for step in steps for rank in step for row in rank if row]


SHUFFLES = ["global", "window"]


@pytest.mark.cases(quick="stream-global", slow="batch-window")
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("scope", ["stream", "batch"])
def test_an_epoch_trains_every_sample_once_and_no_row_is_over_budget(
    folder: Path, tmp_path: Path, shuffle: str, scope: str
) -> None:
    data = online(folder, tmp_path, shuffle=shuffle, scope=scope)
    steps = list(
        data.batches(data.start(), rank=0, dp=1, max_steps=data.steps_until(2, data.start()))
    )
    assert {step.epoch for step in steps} == {0, 1}, "the run ends where the second epoch does"
    for epoch in (0, 1):
        micro = [m for step in steps if step.epoch == epoch for m in step.micro_batches]
        assert Counter(s.key for m in micro for s in m.samples) == Counter(
            map(key_of, range(COUNT))
        )
        assert all(m.batch.num_slots <= BUDGET.max_tokens for m in micro)
        planned = [sum(-(-n // 4) * 4 for n in m.batch.lengths) for m in micro]
        assert max(planned) <= BUDGET.max_tokens
        assert max(len(m.samples) for m in micro) > 1, "nothing shared a row"
    one, two = (
        [
            tuple(s.key for m in step.micro_batches for s in m.samples)
            for step in steps
            if step.epoch == e
        ]
        for e in (0, 1)
    )
    assert one != two, "the second epoch has an order of its own"


@pytest.mark.cases(slow="window")
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_the_rows_are_the_same_on_any_number_of_ranks(
    folder: Path, tmp_path: Path, shuffle: str
) -> None:
    alone = epoch_of(online(folder, tmp_path, shuffle=shuffle))
    for dp in (2, 3):
        together = epoch_of(online(folder, tmp_path, shuffle=shuffle), dp=dp)
        assert len(together) == len(alone)
        for one, many in zip(alone, together, strict=True):
            assert sorted(map(sorted, rows_of([one]))) == sorted(map(sorted, rows_of([many])))


@pytest.mark.cases(quick="stream-global", slow="batch-window")
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("scope", ["stream", "batch"])
def test_a_run_goes_on_from_every_state(
    folder: Path, tmp_path: Path, shuffle: str, scope: str
) -> None:
    data = online(folder, tmp_path, shuffle=shuffle, scope=scope)
    total = data.steps_until(2, data.start())
    steps = list(data.batches(data.start(), rank=0, dp=1, max_steps=total))
    assert len({(step.state.epoch, step.state.window) for step in steps}) >= 4, "windows change"
    for at in range(0, len(steps) - 1, 3):
        state = DataState.from_json(steps[at].state.to_json())
        again = online(folder, tmp_path, shuffle=shuffle, scope=scope, resume=state)
        (following,) = again.batches(state, rank=0, dp=1, max_steps=state.batches + 1)
        assert following.micro_batches[0].samples == steps[at + 1].micro_batches[0].samples
        assert again.steps_until(2, state) == total - state.batches


class CountedRows:
    """How many samples of windows are packed; a dry run cuts no window."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.samples = 0
        cut = BudgetPacker.__call__

        def counted(packer: BudgetPacker, order: Any) -> Any:
            self.samples += len(order)
            return cut(packer, order)

        monkeypatch.setattr(BudgetPacker, "__call__", counted)


def test_an_epoch_is_packed_once_for_its_figures_and_its_steps(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = online(folder, tmp_path, shuffle="global").steps_per_epoch()
    counted = CountedRows(monkeypatch)
    data = online(folder, tmp_path, shuffle="global")
    summary = data.summary()
    assert counted.samples == COUNT
    assert data.steps_until(1, data.start()) == summary.epoch_steps == fresh
    assert counted.samples == COUNT, "no window is packed again to count it"
    data.steps_until(2, data.start())
    assert counted.samples == 2 * COUNT


def test_a_long_epoch_is_summed_up_by_its_first_window(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = online(folder, tmp_path, shuffle="global").summary()
    monkeypatch.setattr("vlmpack.data.splits.split.SUMMARY_SAMPLES", COUNT - 1)
    counted = CountedRows(monkeypatch)
    data = online(folder, tmp_path, shuffle="global")
    summary = data.summary()
    assert counted.samples == summary.row_samples < COUNT
    assert (summary.epoch_is_exact, whole.epoch_is_exact) == (False, True)
    assert summary.epoch_samples == whole.epoch_samples == COUNT
    assert abs(summary.epoch_steps - whole.epoch_steps) <= 3
    exact = data.epoch_length()
    assert (exact.num_steps, exact.exact) == (whole.epoch_steps, True), "asked for, it is counted"
    assert counted.samples == COUNT, "the first window only once"
    sets = online(folder, tmp_path, shuffle="global", scope="batch", global_batch_size=8).summary()
    assert (sets.epoch_steps, sets.epoch_is_exact) == (8, True), "follows from the samples alone"


def test_scope_batch_keeps_the_sets_of_the_unpacked_run(folder: Path, tmp_path: Path) -> None:
    packed = epoch_of(online(folder, tmp_path, scope="batch", global_batch_size=8))
    plain = epoch_of(
        open_data(str(folder / "s-*.tar"), tmp_path, micro_batch_size=1, mode="none", seq_length=64)
    )
    as_sets = [
        [sorted(key for rank in step for row in rank for key in row) for step in steps]
        for steps in (packed, plain)
    ]
    assert as_sets[0] == as_sets[1]
    assert sum(len(step[0]) for step in packed) < sum(len(step[0]) for step in plain) / 2


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_row_obeys_the_other_bounds(folder: Path, tmp_path: Path, shuffle: str) -> None:
    budget = replace(BUDGET, max_patches=12, max_sequences=3)
    data = online(folder, tmp_path, budget=budget, shuffle=shuffle)
    packs = [row for b in data.planned(data.start(), data.steps_per_epoch()) for row in b.bins]
    patches = [int(data.split.sizes(np.asarray(row))[1].sum()) for row in packs]
    assert max(patches) <= 12 and max(map(len, packs)) <= 3
    free = online(folder, tmp_path / "free", shuffle=shuffle)
    loose = [row for b in free.planned(free.start(), free.steps_per_epoch()) for row in b.bins]
    assert max(map(len, loose)) > 3, "the bound on sequences bound nothing"
    assert max(int(free.split.sizes(np.asarray(row))[1].sum()) for row in loose) > 12


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("over_long", ["error", "drop", "shrink_images"])
def test_a_sample_above_the_vision_budget_is_over_long(
    tmp_path: Path, shuffle: str, over_long: str
) -> None:
    samples = [(key_of(n), sample_fields(n)) for n in range(9)]
    write_shard(tmp_path / "s-0.tar", samples)  # those of two images have 4 patches and more
    budget = replace(BUDGET, max_patches=3)

    def keys() -> set[str]:
        data = online(
            tmp_path, tmp_path / "index", budget=budget, shuffle=shuffle, over_long=over_long
        )
        return set().union(*rows_of(epoch_of(data)))

    if over_long == "error":
        with pytest.raises(
            DataError,
            match=r"(has|have) more vision patches than packing.max_vision_patches 3; the largest",
        ):
            keys()
    elif over_long == "drop":
        kept = keys()
        assert 0 < len(kept) < 9 and key_of(0) in kept
    else:
        assert keys() == {key for key, _ in samples}


def test_another_budget_is_another_run(folder: Path, tmp_path: Path) -> None:
    state = online(folder, tmp_path).start()
    for changes in (
        {"budget": replace(BUDGET, max_tokens=80)},
        {"budget": replace(BUDGET, max_patches=100)},
        {"budget": replace(BUDGET, max_sequences=5)},
        {"budget": replace(BUDGET, alignment=8)},
        {"scope": "batch"},
    ):
        with pytest.raises(RunIdentityError, match=r"packing\."):
            online(folder, tmp_path, **changes).admit(state)
    online(folder, tmp_path, balance="none").admit(state)


def test_another_alignment_may_begin_an_era(folder: Path, tmp_path: Path) -> None:
    state = online(folder, tmp_path).start()
    changed = online(folder, tmp_path, budget=replace(BUDGET, alignment=8), new_era=True)
    admitted = changed.admit(state)
    assert admitted.identity["packing.alignment"] == 8 and len(admitted.eras) == 2


def test_the_dry_run_settles_the_sequences_and_the_plan_keeps_to_them(
    folder: Path, tmp_path: Path
) -> None:
    data = online(folder, tmp_path)
    most = data.split.identity["packing.max_sequences"]
    assert isinstance(most, int) and most % 8 == 0
    streamed = online(folder, tmp_path, shuffle="window")
    assert streamed.split.identity["packing.max_sequences"] == 32
    assert advised_max_sequences([3] * 998 + [9, 17]) == 16, "the 99.9th percentile, rounded up"


def test_sets_of_samples_with_a_bound_need_no_dry_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[int] = []

    rows = RowBudget.rows

    def counting(budget: RowBudget, tokens: Any, patches: Any) -> list[list[int]]:
        packed.append(len(tokens))
        return rows(budget, tokens, patches)

    monkeypatch.setattr(RowBudget, "rows", counting)
    bounded = replace(BUDGET, max_sequences=3)
    settings: dict[str, Any] = {"shuffle": "global", "global_batch_size": 8}
    data = online(folder, tmp_path, scope="batch", budget=bounded, **settings)
    assert data.identity["packing.max_sequences"] == 3 and packed == []
    online(folder, tmp_path, scope="batch", **settings)
    stream = online(folder, tmp_path, budget=bounded, **settings)
    assert packed == [COUNT, COUNT], "to settle the bound; for the size of a window"
    assert stream.identity["packing.max_sequences"] == 3


def test_a_known_bad_sample_leaves_its_hole_in_a_row(folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    samples = [(key_of(n), sample_fields(n)) for n in range(20)]
    samples[7] = (key_of(7), {"json": samples[7][1]["json"], "0.png": b"no image"})
    write_shard(bad / "s-0.tar", samples)
    data = online(bad, tmp_path)
    steps = list(data.batches(data.start(), rank=0, dp=1, max_steps=data.steps_per_epoch()))
    assert [hole.key for step in steps for hole in step.skipped] == [key_of(7)]
    seen = {s.key for step in steps for m in step.micro_batches for s in m.samples}
    assert seen == {key_of(n) for n in range(20)} - {key_of(7)}


def test_weighted_sources_are_packed_together(folder: Path, tmp_path: Path) -> None:
    sources = tuple(
        Source(name=name, path=str(folder / pattern), weight=weight)
        for name, pattern, weight in (("a", "s-000[0-3].tar", 1.0), ("b", "s-000[4-8].tar", 3.0))
    )
    data = online(folder, tmp_path, sources=sources, epoch_size=40)
    steps = epoch_of(data)
    keys = [key for row in rows_of(steps) for key in row]
    assert len(keys) == 40
    assert sum(key < key_of(28) for key in keys) == 10


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_ranks_get_equal_numbers_and_the_members_stay(dp: int) -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(1, 4000, 400)
    patches = rng.integers(0, 900, 400)
    packer = BudgetPacker(
        budget=RowBudget(max_tokens=4096),
        global_batch_size=32,
        scope="stream",
        sizes=lambda numbers: (tokens[numbers], patches[numbers]),
    )
    worst = {True: 1.0, False: 1.0}
    for bins in packer(np.arange(400)):
        for balanced in (True, False):
            shares = bins_by_rank(
                bins,
                dp,
                known=Known(
                    sizes=packer.sizes, sequence_tokens=lambda numbers: tokens[numbers][:, None]
                ),
                row_cost=lambda t, s, p, *, patch_squares: np.stack(
                    [t + s / 4096, 2.0 * p], axis=1
                ),
                balanced=balanced,
            )
            assert len({len(share) for share in shares.bins}) == 1
            assert sorted(b for share in shares.bins for b in share if b) == sorted(bins)
            for share in shares.bins:
                empty = [not b for b in share]
                assert empty == sorted(empty), "an empty bin stands before a full one"
            assert shares.imbalance >= 1.0 - 1e-12
            if len(bins) == 32:
                worst[balanced] = max(worst[balanced], shares.imbalance)
    if dp == 1:
        assert worst == {True: 1.0, False: 1.0}
    else:
        assert worst[True] < 1.03 < worst[False]


def test_costs_are_sums_over_a_bin() -> None:
    tokens, patches = np.array([3, 5, 7]), np.array([0, 4, 1])

    def row_cost(total: Any, squares: Any, vision: Any, *, patch_squares: Any) -> Any:
        return np.stack([total, squares, vision, patch_squares], axis=1).astype(np.float64)

    known = Known(
        sizes=lambda numbers: (tokens[numbers], patches[numbers]),
        sequence_tokens=lambda numbers: tokens[numbers][:, None],
    )
    costs = bin_costs([(0, 2), (), (1,)], known, row_cost)
    assert costs.tolist() == [[10, 58, 1, 1], [0, 0, 0, 0], [5, 25, 4, 16]]
    assert token_cost(tokens, tokens, tokens, patch_squares=tokens).tolist() == [[3], [5], [7]]


def test_rows_are_those_of_the_packer_alone() -> None:
    """Against one row at a time by exhaustive search: the oldest, and the fullest with it."""
    tokens = np.array([5, 9, 3, 4, 7, 2, 8, 6])
    rows = RowBudget(max_tokens=16).rows(tokens, np.zeros(8, np.int64))
    left = list(range(8))
    for row in rows:
        oldest, others = left[0], left[1:]
        best = max(
            sum(tokens[[oldest, *(o for i, o in enumerate(others) if choice >> i & 1)]])
            for choice in range(1 << len(others))
            if sum(tokens[[oldest, *(o for i, o in enumerate(others) if choice >> i & 1)]]) <= 16
        )
        assert oldest in row and sum(tokens[row]) == best
        left = [sample for sample in left if sample not in row]
    assert not left


def test_windows_are_long_enough_that_short_batches_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    assert window_samples(64) == 4096
    assert window_samples(64, samples_per_row=5) == 64 * 64 * 5
    assert window_samples(3, samples_per_row=1) == 4098


def test_any_window_is_packed_alone(folder: Path, tmp_path: Path) -> None:
    data = online(folder, tmp_path, shuffle="global")
    plan = data.plan
    walked = list(data.planned(data.start(), 2 * data.steps_per_epoch()))
    windows = {batch.position.window for batch in walked}
    assert len(windows) > 2
    for window in windows:
        alone = plan.packed(Position(0, window), ())
        assert alone == [
            b.bins for b in walked if (b.position.epoch, b.position.window) == (0, window)
        ]
