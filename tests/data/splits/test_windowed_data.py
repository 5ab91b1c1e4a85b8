"""Training that starts without an index: windows of shards, indexed as the run goes on."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.shard_fakes import (
    COUNT,
    FakeEncoder,
    chat_json,
    config_for,
    image_bytes,
    key_of,
    open_data,
    sample_fields,
    write_shard,
    write_shards,
)

from vlmpack.data.forkserver import worker_context
from vlmpack.data.index.parts import read_part, write_part
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.data.plan.windows import WindowPlan
from vlmpack.data.splits import survey
from vlmpack.data.splits.growing_index import SHARD_STRIDE
from vlmpack.data.splits.survey import DataLaunch, resolve_shuffle
from vlmpack.errors import DataError, EmptyDataError, RecipeError, RunIdentityError
from vlmpack.recipe.data import OnErrorSection
from vlmpack.recipe.sources import Source
from vlmpack.run.splits import data_summary
from vlmpack.storage.fetch import ShardStamp

# Windows of 16 over the shards of `folder`: eight global batches, the last short.
pytestmark = pytest.mark.usefixtures("small_windows")


def windowed(paths: str | Path, index_dir: Path, **changes: Any) -> TrainData:
    return open_data(str(paths), index_dir, shuffle="window", **changes)


def num_indexed(index_dir: Path) -> int:
    return len(list(index_dir.glob("*.index.part")))


def steps_of(
    data: TrainData, state: DataState, steps: int, *, dp: int = 1
) -> tuple[list[list[str]], DataState]:
    """The keys of each global batch from a state on, all ranks together, and the state after."""
    ranks = [
        list(data.batches(state, rank=rank, dp=dp, max_steps=state.batches + steps))
        for rank in range(dp)
    ]
    batches = []
    for shares in zip(*ranks, strict=True):
        assert len({len(share.micro_batches) for share in shares}) == 1, "unequal steps"
        assert all(share.state == shares[0].state for share in shares)
        keys = [s.key for share in shares for m in share.micro_batches for s in m.samples]
        assert len(keys) == len(set(keys)) == shares[0].num_samples, "ranks are not disjoint"
        batches.append(sorted(keys))
    return batches, ranks[0][-1].state if ranks[0] else state


def test_an_epoch_is_every_sample_once(folder: Path, tmp_path: Path) -> None:
    data = windowed(folder / "s-*.tar", tmp_path)
    batches, state = steps_of(data, data.start(), 16)
    everything = [key_of(number) for number in range(COUNT)]
    assert [len(batch) for batch in batches] == [8, 8, 8, 8, 8, 8, 8, 5] * 2
    assert sorted(key for batch in batches[:8] for key in batch) == everything
    assert sorted(key for batch in batches[8:] for key in batch) == everything
    assert batches[:8] != batches[8:]
    assert (state.epoch, state.window, state.batch, state.batches) == (2, 0, 0, 16)
    assert state.cursors == ((2, 0, 0),)


@pytest.mark.slow
def test_an_index_made_before_changes_nothing(folder: Path, tmp_path: Path) -> None:
    fresh, indexed = (windowed(folder / "s-*.tar", tmp_path / name) for name in ("a", "b"))
    assert num_indexed(tmp_path / "b") == 3
    indexed.split.index_all()
    assert num_indexed(tmp_path / "b") == 9
    one, state = steps_of(fresh, fresh.start(), 16)
    two, other = steps_of(indexed, indexed.start(), 16)
    assert (one, state) == (two, other)


@pytest.mark.cases(slow="3")
@pytest.mark.parametrize("dp", [2, 3, 4])
def test_ranks_together_make_the_same_global_batches(folder: Path, tmp_path: Path, dp: int) -> None:
    one, many = (windowed(folder / "s-*.tar", tmp_path / str(n)) for n in (1, dp))
    assert steps_of(many, many.start(), 16, dp=dp) == steps_of(one, one.start(), 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stops",
    [(1, 7, 8, 16, 18), range(19)],
    ids=["edges", "every"],
)
def test_resume_at_every_step_and_from_a_resume(
    folder: Path, tmp_path: Path, stops: Sequence[int]
) -> None:
    """Window edges lie at every second batch, epoch edges at 8 and 16."""
    data = windowed(folder / "s-*.tar", tmp_path)
    whole, end = steps_of(data, data.start(), 18)
    for first in stops:
        head, state = steps_of(data, data.start(), first, dp=1 + first % 4)
        text = state.to_json()
        assert len(text) < 2048
        other = windowed(folder / "s-*.tar", tmp_path, resume=DataState.from_json(text))
        middle, state = steps_of(other, DataState.from_json(text), (18 - first) // 2, dp=2)
        tail, state = steps_of(other, state, 18 - first - len(middle), dp=3)
        assert head + middle + tail == whole, first
        assert state == end


def test_a_resume_elsewhere_indexes_its_window_and_not_what_came_before(
    folder: Path, tmp_path: Path
) -> None:
    data = windowed(folder / "s-*.tar", tmp_path / "a")
    whole, _ = steps_of(data, data.start(), 8)
    _, state = steps_of(data, data.start(), 4)
    assert state.window == 2
    other = windowed(folder / "s-*.tar", tmp_path / "b", resume=state)
    assert num_indexed(tmp_path / "b") == 3
    assert steps_of(other, state, 4)[0] == whole[4:]


def test_only_the_first_windows_shards_are_indexed_before_the_first_batch(tmp_path: Path) -> None:
    write_shards(tmp_path, 200, per_shard=2)
    data = windowed(tmp_path / "s-*.tar", tmp_path / "i")
    step = next(data.batches(data.start(), rank=0, dp=1, max_steps=20))
    assert (step.batch, step.num_samples) == (0, 8)
    assert 8 <= num_indexed(tmp_path / "i") <= 10, "of 100 shards; eight hold a window"


def test_auto_is_settled_by_what_is_indexed_and_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = str(folder / "s-*.tar")
    assert open_data(pattern, tmp_path / "a").identity["data.shuffle"] == "global"
    monkeypatch.setattr(survey, "INDEX_FIRST_BYTES", 1000)
    fresh = open_data(pattern, tmp_path / "b")
    assert fresh.identity["data.shuffle"] == "window"
    state = fresh.start()
    fresh.split.index_all()
    assert open_data(pattern, tmp_path / "b").identity["data.shuffle"] == "global"
    assert open_data(pattern, tmp_path / "b", resume=state).identity == state.identity


def test_auto_is_window_where_a_shard_is_remote() -> None:
    stamps = [ShardStamp("/a.tar", 1, "1"), ShardStamp("s3://b/a.tar", 1, "1")]
    common: dict[str, Any] = {"rule": "r-1", "directory": Path("/none"), "max_bytes": 10}
    assert resolve_shuffle(stamps, **common) == "window"
    assert resolve_shuffle(stamps[:1], **common) == "global"


def test_epoch_length_is_an_estimate_until_everything_is_indexed(
    folder: Path, tmp_path: Path
) -> None:
    data = windowed(folder / "s-*.tar", tmp_path)
    guess = data.epoch_length()
    assert not guess.exact and 40 <= guess.num_samples <= 90
    assert data.summary().epoch_is_exact is False
    assert data.summary().num_indexed < data.summary().num_shards == 9
    data.split.index_all()
    exact = data.epoch_length()
    assert (exact.num_samples, exact.num_steps, exact.exact) == (COUNT, 8, True)
    assert data.steps_per_epoch() == 8


def two_sources(folder: Path, weights: tuple[float | None, ...]) -> tuple[Source, ...]:
    return tuple(
        Source(name=name, path=write_shards(folder / name, count, per_shard=4, start=at), weight=w)
        for name, count, at, w in zip(("a", "b"), (6, 30), (0, 100), weights, strict=True)
    )


def test_blend_without_an_index_needs_an_epoch_size(tmp_path: Path) -> None:
    sources = two_sources(tmp_path, (3.0, 1.0))
    with pytest.raises(RecipeError, match=r"data\.epoch_size: missing.*10 files.*vlmpack index"):
        windowed("", tmp_path / "i", sources=sources)
    data = windowed("", tmp_path / "i", sources=sources, epoch_size=40)
    keys = [key for batch in _keys(data, 5) for key in batch]
    small = [key for key in keys if key < key_of(100)]
    assert (len(keys), len(small)) == (40, 30)
    assert {small.count(key) for key in small} == {5}
    data.split.index_all()
    later = windowed("", tmp_path / "i", sources=sources)
    assert later.epoch_length().num_samples == 36


def test_two_sources_without_weights_are_each_seen_once(tmp_path: Path) -> None:
    data = windowed("", tmp_path / "i", sources=two_sources(tmp_path, (None, None)))
    keys = [key for batch in _keys(data, 5) for key in batch]
    assert sorted(keys) == [key_of(n) for n in [*range(6), *range(100, 130)]]


def _keys(data: TrainData, steps: int) -> list[list[str]]:
    found = data.batches(data.start(), rank=0, dp=1, max_steps=steps)
    return [[s.key for m in step.micro_batches for s in m.samples] for step in found]


def test_over_long_samples_by_policy_when_their_window_comes(tmp_path: Path) -> None:
    samples = [(key_of(n), sample_fields(n, num_images=0)) for n in range(40)]
    samples[3] = ("long", {"json": chat_json("x" * 300, "a")})
    samples[30] = ("wide", {"json": chat_json("q", "a", 1), "0.png": image_bytes(320, 320)})
    for shard in range(10):
        write_shard(tmp_path / f"s-{shard:04d}.tar", samples[4 * shard : 4 * shard + 4])
    pattern, ledger = str(tmp_path / "s-*.tar"), Ledger(tmp_path / "ledger.jsonl")
    options: dict[str, Any] = {"seq_length": 200, "ledger": ledger, "num_probed": 0}
    data = windowed(pattern, tmp_path / "i", over_long="drop", **options)
    keys = sorted(key for batch in _keys(data, 5) for key in batch)
    assert keys == sorted(key for key, _ in samples if key not in ("long", "wide"))
    lines = {line["key"]: line for line in ledger.lines()}
    assert sorted(lines) == ["long", "wide"] and lines["long"]["class"] == "too_long"
    assert lines["long"]["sample"] == 0 * SHARD_STRIDE + 3

    data = windowed(pattern, tmp_path / "j", over_long="shrink_images", **options)
    found = [s.key for m in _micros(data, 5) for s in m.samples]
    assert sorted(found) == sorted(key for key, _ in samples if key != "long")

    with pytest.raises(DataError, match=r"1 of 4 samples is longer than training.seq_length"):
        _keys(windowed(pattern, tmp_path / "k", over_long="error", **options), 5)


def _micros(data: TrainData, steps: int) -> Iterator[Any]:
    for step in data.batches(data.start(), rank=0, dp=1, max_steps=steps):
        yield from step.micro_batches


def test_bad_samples_are_holes_and_damaged_shards_errors_when_met(tmp_path: Path) -> None:
    write_shards(tmp_path, 40, per_shard=4)
    write_shard(tmp_path / "s-0005.tar", [("bad", {"json": b"{"}), ("good", sample_fields(0))])
    pattern = str(tmp_path / "s-*.tar")
    data = windowed(pattern, tmp_path / "i", on_error=OnErrorSection(schema="skip"))
    steps = list(data.batches(data.start(), rank=0, dp=1, max_steps=5))
    assert [hole.key for step in steps for hole in step.skipped] == ["bad"]
    assert sum(step.num_samples for step in steps) == 38
    with pytest.raises(DataError, match=r"data\.on_error\.schema: skip"):
        _keys(windowed(pattern, tmp_path / "i"), 5)
    path = tmp_path / "s-0007.tar"
    path.write_bytes(path.read_bytes()[:2000])
    data = windowed(pattern, tmp_path / "i", on_error=OnErrorSection(schema="skip"))
    with pytest.raises(DataError, match=r"s-0007\.tar"):
        _keys(data, 5)


def write_bad_shards(folder: Path, shards: Sequence[int]) -> None:
    for shard in shards:
        bad = [(f"bad{shard}-{n}", {"json": b"{"}) for n in range(20)]
        write_shard(folder / f"s-{shard:04d}.tar", bad)


@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_only_bad_samples_are_no_data(tmp_path: Path, shuffle: str) -> None:
    write_bad_shards(tmp_path, [0])
    options: dict[str, Any] = {"shuffle": shuffle, "on_error": OnErrorSection(schema="skip")}
    with pytest.raises(EmptyDataError, match=r"20 samples in 1 shard, of which 20 are bad"):
        open_data(str(tmp_path / "s-*.tar"), tmp_path / "i", **options)


def test_a_first_window_of_bad_samples_has_no_figures_and_is_passed(tmp_path: Path) -> None:
    write_shards(tmp_path, 40, per_shard=10)
    pattern = str(tmp_path / "s-*.tar")
    plan = windowed(pattern, tmp_path / "i").plan
    assert isinstance(plan, WindowPlan)
    write_bad_shards(tmp_path, [int(plan.shard_order(plan.sources[0], 0)[0])])
    data = windowed(pattern, tmp_path / "i", on_error=OnErrorSection(schema="skip"))
    figures = data.summary()
    assert figures.num_bad == {"schema": 20} and figures.num_usable == 0
    assert set(figures.length_percentiles.values()) == {0} and figures.padded_slots == 0
    steps = list(data.batches(data.start(), rank=0, dp=1, max_steps=7))
    assert sum(len(step.skipped) for step in steps) == 20
    assert sum(len(keys) for keys in _keys(data, 7)) == 30


@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_the_reports_examples_are_the_launchs_next_bins(
    folder: Path, tmp_path: Path, shuffle: str
) -> None:
    pattern = str(folder / "s-*.tar")
    first = open_data(pattern, tmp_path / "i", shuffle=shuffle)
    _, middle = steps_of(first, first.start(), 5)
    assert (middle.window, middle.batch) == (2, 1), "guard: inside a window"
    for state, count in ((first.start(), 6), (middle, 3)):
        index_dir = tmp_path / str(count)
        data = open_data(pattern, index_dir, shuffle=shuffle, resume=state)
        figures, before = data.summary(), num_indexed(index_dir)
        drawn = data_summary(data, state, figures)["example_micro_batches"]
        assert num_indexed(index_dir) == before, "other ranks wait for this"
        planned = islice(data.plan.walk(state.position, state.cursors), 2)
        bins = [bin for batch in planned for bin in batch.bins]
        assert drawn == [[data.ref(n).num_tokens for n in bin] for bin in bins[:count]]
        assert len(drawn) == count


def test_one_shard_and_fewer_samples_than_a_global_batch(tmp_path: Path) -> None:
    data = windowed(write_shards(tmp_path, 3, per_shard=3), tmp_path / "i")
    for dp in (1, 4):
        batches, state = steps_of(data, data.start(), 3, dp=dp)
        assert [sorted(batch) for batch in batches] == [[key_of(n) for n in range(3)]] * 3
        assert (state.epoch, state.batches) == (3, 3)
    assert data.steps_per_epoch() == 1


def test_an_empty_match_and_empty_shards(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="matches no file"):
        windowed(tmp_path / "none-*.tar", tmp_path / "i")
    pattern = write_shards(tmp_path, 6, per_shard=3)
    with pytest.raises(EmptyDataError, match="no usable sample"):
        windowed(pattern, tmp_path / "i", seq_length=1, over_long="drop")


def test_the_same_key_in_two_shards_is_two_samples(tmp_path: Path) -> None:
    for name in ("x", "y"):
        write_shard(tmp_path / f"s-{name}.tar", [("a", sample_fields(0)), ("b", sample_fields(1))])
    data = windowed(tmp_path / "s-*.tar", tmp_path / "i")
    found = [(s.key, Path(s.shard).name) for m in _micros(data, 1) for s in m.samples]
    assert sorted(found) == [(k, f"s-{n}.tar") for k in "ab" for n in "xy"]


def test_a_rewritten_shard_is_refused_readably(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, 20, per_shard=5)
    data = windowed(pattern, tmp_path / "i")
    _, state = steps_of(data, data.start(), 1)
    write_shard(tmp_path / "s-0003.tar", [(key_of(n), sample_fields(n + 1)) for n in range(5)])
    with pytest.raises(RunIdentityError, match=r"(?s)data\.train\.one.*new_era"):
        windowed(pattern, tmp_path / "i", resume=state)
    other = windowed(pattern, tmp_path / "i", new_era=True, seed=8)
    with pytest.raises(RunIdentityError, match=r"data\.seed"):
        next(other.batches(state, rank=0, dp=1, max_steps=9))


def test_validation_sees_each_sample_once_whatever_the_shuffle(
    folder: Path, tmp_path: Path
) -> None:
    data = windowed(folder / "s-*.tar", tmp_path)
    for dp in (1, 3):
        shares = [list(data.eval_batches(rank=rank, dp=dp)) for rank in range(dp)]
        assert len({len(share) for share in shares}) == 1
        keys = [s.key for share in shares for micro in share for s in micro.samples]
        assert sorted(keys) == [key_of(n) for n in range(COUNT)]


def test_memory_of_the_index_is_bounded(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """No shard is read again inside a window, and old windows' shards are forgotten."""
    data = windowed(folder / "s-*.tar", tmp_path)
    one = steps_of(data, data.start(), 16)
    assert len(data.split.index.kept()) == 9  # type: ignore[attr-defined]
    monkeypatch.setattr("vlmpack.data.splits.growing_index.MAX_KEPT_ROWS", 1)
    other = windowed(folder / "s-*.tar", tmp_path)
    index = other.split.index  # type: ignore[attr-defined]
    loads: list[int] = []
    original = index._load
    monkeypatch.setattr(index, "_load", lambda shard: loads.append(shard) or original(shard))
    assert steps_of(other, other.start(), 16) == one
    assert 9 <= len(loads) <= 18, "each shard once an epoch, and some were forgotten in between"
    assert len(index.kept()) < 9
    rows = sum(fitted.table.num_samples for fitted in index.kept())
    assert rows <= 3 * (16 + 2 * 7)


def _rank(pattern: str, index_dir: Path, rank: int, dp: int, out: str) -> None:
    import vlmpack.data.plan.packers

    vlmpack.data.plan.packers.MIN_WINDOW_SAMPLES = 16
    config = config_for(pattern, index_dir, shuffle="window")
    launch = DataLaunch(rank=rank, world_size=dp)
    data = TrainData.open(config, FakeEncoder(), launch=launch)
    keys = [
        [sample.key for micro in step.micro_batches for sample in micro.samples]
        for step in data.batches(data.start(), rank=rank, dp=dp, max_steps=16)
    ]
    Path(out).write_text(repr(keys))


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_real_ranks_share_an_index_folder_or_not(
    folder: Path, tmp_path: Path, shared: bool
) -> None:
    context = worker_context()
    jobs: list[multiprocessing.process.BaseProcess] = []
    for rank in range(3):
        index_dir = tmp_path / ("i" if shared else f"i{rank}")
        arguments = (str(folder / "s-*.tar"), index_dir, rank, 3, str(tmp_path / f"out{rank}"))
        jobs.append(context.Process(target=_rank, args=arguments))  # type: ignore[attr-defined]
        jobs[-1].start()
    for job in jobs:
        job.join(120)
        assert job.exitcode == 0
    shares = [eval((tmp_path / f"out{rank}").read_text()) for rank in range(3)]
    together = [
        sorted(key for part in parts for key in part) for parts in zip(*shares, strict=True)
    ]
    data = windowed(folder / "s-*.tar", tmp_path / "one")
    assert together == steps_of(data, data.start(), 16)[0]


@pytest.mark.soak
def test_the_next_window_is_indexed_while_this_one_trains(
    folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("vlmpack.data.splits.growing_index.HELPER_MIN_BYTES", 0)
    data = windowed(folder / "s-*.tar", tmp_path)
    before = num_indexed(tmp_path)
    steps = data.batches(data.start(), rank=0, dp=1, max_steps=16)
    next(steps), next(steps)
    deadline = time.monotonic() + 60
    while num_indexed(tmp_path) < before + 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert num_indexed(tmp_path) >= before + 2, "nothing was made while no batch was asked for"
    assert len(list(steps)) == 14
    assert not multiprocessing.active_children()
    assert {path.suffix for path in tmp_path.iterdir()} == {".part", ".lock"}


def test_seeded_windows_mix_shards(folder: Path, tmp_path: Path) -> None:
    """Guard for the shuffle: a window's batches are not its shards in order."""
    data = windowed(folder / "s-*.tar", tmp_path)
    (first, second) = [
        np.asarray([s.number // SHARD_STRIDE for m in step.micro_batches for s in m.samples])
        for step in data.batches(data.start(), rank=0, dp=1, max_steps=2)
    ]
    assert set(first.tolist()) & set(second.tolist())


@pytest.mark.cases(slow="2-0")
@pytest.mark.slow
@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (2, 0), (5, 1)])
def test_shards_that_a_run_stopped_in_may_not_be_indexed_as_others(
    folder: Path, tmp_path: Path, steps: int, batch: int
) -> None:
    """Index files that are whole by their digests and list a sample less; the others may change."""
    data = windowed(folder / "s-*.tar", tmp_path / "i")
    everything, _ = steps_of(data, data.start(), 8)
    _, state = steps_of(data, data.start(), steps)
    assert (state.batch, DataState.from_json(state.to_json())) == (batch, state) and state.shards
    assert batch or any(cursor[2] for cursor in state.cursors), "guard: it stands inside a shard"
    refused = set()
    for number in range(9):
        shutil.copytree(tmp_path / "i", tmp_path / "other")
        for kind in ("index", "lengths"):
            (part,) = (tmp_path / "other").glob(f"s-{number:04d}.*.{kind}.part")
            table = read_part(str(part))
            write_part(str(part), table.slice(0, len(table) - 1), table.schema.metadata or {})
        again = windowed(folder / "s-*.tar", tmp_path / "other")
        try:
            found, _ = steps_of(again, state, 8 - steps)
        except RunIdentityError as error:
            assert "the shards that this run stopped in now have other" in str(error)
            refused.add(number)
        else:
            rest = [key for keys in found for key in keys]
            trained = [key for keys in everything[:steps] for key in keys]
            assert not set(rest) & set(trained) and len(rest) + len(trained) in (COUNT, COUNT - 1)
        shutil.rmtree(tmp_path / "other")
    assert (3 if batch else 1) <= len(refused) < 9
    again = windowed(folder / "s-*.tar", tmp_path / "i")
    assert steps_of(again, state, 8 - steps)[0] == everything[steps:]
