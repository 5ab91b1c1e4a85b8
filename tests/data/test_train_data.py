"""Global batches from shards: the same for any ranks, workers, resume point and bad sample."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.shard_fakes import (
    assert_same_tensors,
    collator,
    key_of,
    loading,
    micro_batches,
    open_data,
    write_shards,
)

from vlmpack.data.loading.loader import BinRequest
from vlmpack.data.pipeline import GlobalStep, TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.recipe.sources import Source

COUNT = 37  # five global batches of 8, the last one short


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_shards(folder, COUNT, per_shard=10)
    return folder


@pytest.fixture
def data(folder: Path) -> TrainData:
    return open_data(str(folder / "s-*.tar"), folder / "i")


def steps_of(
    data: TrainData, state: DataState, steps: int, *, dp: int = 1
) -> tuple[list[list[str]], DataState]:
    """The keys of each global batch from a state on, all ranks together, and the state after."""
    ranks = [
        list(data.batches(state, rank=rank, dp=dp, max_steps=state.batches + steps))
        for rank in range(dp)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    batches = []
    for shares in zip(*ranks, strict=True):
        assert len({len(share.micro_batches) for share in shares}) == 1, "unequal steps"
        assert len({share.state for share in shares if not share.state.eras}) <= 1
        assert all(share.state == shares[0].state for share in shares)
        keys = [
            sample.key
            for share in shares
            for micro in share.micro_batches
            for sample in micro.samples
        ]
        assert len(keys) == len(set(keys)) == shares[0].num_samples, "ranks are not disjoint"
        batches.append(sorted(keys))
    return batches, ranks[0][-1].state if ranks[0] else state


def test_an_epoch_is_every_sample_once_and_the_next_has_another_order(data: TrainData) -> None:
    assert data.steps_per_epoch() == 5
    batches, state = steps_of(data, data.start(), 10)
    everything = [key_of(number) for number in range(COUNT)]
    assert [len(batch) for batch in batches] == [8, 8, 8, 8, 5] * 2
    assert sorted(key for batch in batches[:5] for key in batch) == everything
    assert sorted(key for batch in batches[5:] for key in batch) == everything
    assert batches[:5] != batches[5:]
    assert (state.epoch, state.batch, state.batches, state.cursors) == (2, 0, 10, (2 * COUNT,))


@pytest.mark.parametrize("dp", [2, 3, 4])
def test_ranks_together_make_the_same_global_batches(data: TrainData, dp: int) -> None:
    one, _ = steps_of(data, data.start(), 10)
    many, _ = steps_of(data, data.start(), 10, dp=dp)
    assert many == one


def test_more_ranks_than_bins_still_take_equal_steps(folder: Path) -> None:
    data = open_data(str(folder / "s-*.tar"), folder / "i", micro_batch_size=8)
    for rank in range(4):
        steps = list(data.batches(data.start(), rank=rank, dp=4, max_steps=5))
        assert [len(step.micro_batches) for step in steps] == [1] * 5
        for step in steps:
            (micro,) = step.micro_batches
            assert bool(micro.samples) == (rank == 0)
            assert micro.batch.num_label_tokens > 0 or rank != 0
            assert micro.batch.num_slots > 0, "an empty bin still runs"


def test_resume_at_every_step_and_from_a_resume(data: TrainData) -> None:
    whole, end = steps_of(data, data.start(), 12)
    for first in range(13):
        head, state = steps_of(data, data.start(), first)
        state = DataState.from_json(state.to_json())
        middle, state = steps_of(data, state, (12 - first) // 2, dp=2)
        state = DataState.from_json(state.to_json())
        tail, state = steps_of(data, state, 12 - first - len(middle), dp=3)
        assert head + middle + tail == whole, first
        assert state == end


def test_resume_with_another_micro_batch_size(folder: Path, data: TrainData) -> None:
    whole, _ = steps_of(data, data.start(), 9)
    _, state = steps_of(data, data.start(), 4)
    other = open_data(str(folder / "s-*.tar"), folder / "i", micro_batch_size=2)
    assert steps_of(other, state, 5)[0] == whole[4:]


def test_nothing_left_to_do(data: TrainData) -> None:
    _, state = steps_of(data, data.start(), 3)
    assert list(data.batches(state, rank=0, dp=1, max_steps=3)) == []


@pytest.mark.slow
def test_workers_change_nothing(folder: Path) -> None:
    """0 and 2 workers: the same tensors, in the same order; the global generator is not drawn."""
    pattern = str(folder / "s-*.tar")
    inside = open_data(pattern, folder / "i")
    outside = open_data(pattern, folder / "i", **loading(2, timeout_seconds=120))
    torch.manual_seed(5)
    before, python_before = torch.get_rng_state(), random.getstate()
    one, two = micro_batches(inside), micro_batches(outside)
    assert len(one) == len(two) == 3 * 6 - 1
    for left, right in zip(one, two, strict=True):
        assert_same_tensors(left, right)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python_before


def test_the_fake_pictures_differ(data: TrainData) -> None:
    """Guard: comparing pixels means nothing if they are all alike."""
    sums = {
        float(micro.batch.media.pixel_values.sum())
        for micro in micro_batches(data)
        if micro.batch.media is not None
    }
    assert len(sums) > 8


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_eval_sees_each_sample_once_in_equal_steps(data: TrainData, dp: int) -> None:
    shares = [list(data.eval_batches(rank=rank, dp=dp)) for rank in range(dp)]
    assert len({len(share) for share in shares}) == 1
    numbers = [s.number for share in shares for micro in share for s in micro.samples]
    assert sorted(numbers) == list(range(COUNT))
    in_turn = [micro for group in zip(*shares, strict=True) for micro in group]
    assert [s.number for micro in in_turn for s in micro.samples] == list(range(COUNT))


def test_eval_of_the_first_few(data: TrainData) -> None:
    batches = list(data.eval_batches(rank=0, dp=1, max_samples=7))
    assert [[s.number for s in micro.samples] for micro in batches] == [[0, 1, 2], [3, 4, 5], [6]]


def test_samples_are_cooked_in_index_order(data: TrainData) -> None:
    samples = list(data.samples())
    assert [sample.key for sample in samples] == [key_of(number) for number in range(COUNT)]
    assert [len(sample.images) for sample in samples[:3]] == [0, 1, 2]
    assert samples[4].messages[1].text == "a4"


def test_blend_of_two_sources(tmp_path: Path) -> None:
    sources = tuple(
        Source(
            name=name,
            path=write_shards(tmp_path / name, count, per_shard=9, start=at),
            weight=weight,
        )
        for name, count, at, weight in (("small", 6, 0, 3.0), ("large", 30, 100, 1.0))
    )
    data = open_data("", tmp_path / "i", sources=sources, epoch_size=40)
    keys = [key for batch in steps_of_multiset(data, 5) for key in batch]
    small = [key for key in keys if key < key_of(100)]
    assert (len(keys), len(small)) == (40, 30)
    assert {small.count(key) for key in small} == {5}
    assert len(set(keys) - set(small)) == 10


def steps_of_multiset(data: TrainData, steps: int) -> list[list[str]]:
    found: list[GlobalStep] = list(data.batches(data.start(), rank=0, dp=1, max_steps=steps))
    return [[s.key for micro in step.micro_batches for s in micro.samples] for step in found]


def test_unweighted_sources_are_each_seen_once(tmp_path: Path) -> None:
    sources = tuple(
        Source(name=name, path=write_shards(tmp_path / name, 11, per_shard=4, start=at))
        for name, at in (("a", 0), ("b", 100))
    )
    data = open_data("", tmp_path / "i", sources=sources)
    keys = [key for batch in steps_of_multiset(data, data.steps_per_epoch()) for key in batch]
    assert sorted(keys) == [key_of(n) for n in [*range(11), *range(100, 111)]]


def test_summary_counts_padding_of_the_same_micro_batches(data: TrainData) -> None:
    summary = data.summary()
    micros = micro_batches(data, data.steps_per_epoch())
    longest = sum(max(micro.batch.lengths) * len(micro.batch.lengths) for micro in micros)
    real = sum(micro.batch.num_tokens for micro in micros)
    assert (summary.padded_slots, summary.packed_slots) == (longest, real)
    assert summary.epoch_tokens == summary.num_tokens == real
    assert summary.padding_removed > 0
    assert summary.length_percentiles[100] == max(max(micro.batch.lengths) for micro in micros)
    assert (summary.num_samples, summary.num_shards, summary.epoch_steps) == (COUNT, 4, 5)


def test_micro_batches_say_what_they_cost(data: TrainData) -> None:
    micro = micro_batches(data, 1)[0]
    assert micro.read_seconds > 0 and micro.encode_seconds > 0
    assert micro.num_images == sum(s.number % 3 for s in micro.samples)


def test_an_empty_request_is_the_collators_empty_batch(data: TrainData) -> None:
    item = data.dataset[BinRequest(())]
    assert torch.equal(item.batch.input_ids, collator().empty().input_ids)  # type: ignore[union-attr]
