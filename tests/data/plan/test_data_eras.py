"""A run that goes on with other data: refused, or a new era; the state stays small."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.shard_fakes import key_of, open_data, sample_fields, write_shard, write_shards

from vlmpack.build.run import total_steps
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import MAX_STATE_BYTES, DataState, Era, start_era
from vlmpack.errors import RecipeError, RunIdentityError
from vlmpack.recipe.sources import Source

SHUFFLES = pytest.mark.parametrize("shuffle", ["global", "window"])


pytestmark = pytest.mark.usefixtures("small_windows")


def keys_of(data: TrainData, state: DataState, steps: int) -> tuple[list[list[str]], DataState]:
    found = list(data.batches(state, rank=0, dp=1, max_steps=state.batches + steps))
    keys = [[s.key for m in step.micro_batches for s in m.samples] for step in found]
    return keys, found[-1].state


def again(state: DataState) -> DataState:
    return DataState.from_json(state.to_json())


@SHUFFLES
def test_a_rewritten_shard_is_refused_or_begins_an_era(tmp_path: Path, shuffle: str) -> None:
    pattern = write_shards(tmp_path, 40, per_shard=5)
    data = open_data(pattern, tmp_path / "i", shuffle=shuffle)
    _, state = keys_of(data, data.start(), 3)
    write_shard(tmp_path / "s-0003.tar", [(f"new{n}", sample_fields(n)) for n in range(7)])
    refusing = open_data(pattern, tmp_path / "i", shuffle=shuffle)
    with pytest.raises(RunIdentityError, match=r"(?s)data\.train\.one.*on_data_change: new_era"):
        refusing.admit(state)

    options: dict[str, Any] = {"shuffle": shuffle, "new_era": True}
    changed = open_data(pattern, tmp_path / "i", resume=again(state), **options)
    begun = changed.admit(again(state))
    assert (begun.epoch, begun.window, begun.batch, begun.batches) == (1, 0, 0, 3)
    assert [era.start_batch for era in begun.eras] == [0, 3]
    assert begun.identity == changed.identity
    assert set(begun.eras[0].identity) <= {"data.train.one", "lengths"}
    assert begun.eras[0].identity["data.train.one"] == data.identity["data.train.one"]

    whole, end = keys_of(changed, state, 9)
    first_epoch = [key for batch in whole[:6] for key in batch]
    expected = [key_of(n) for n in range(40) if not 15 <= n < 20] + [f"new{n}" for n in range(7)]
    assert sorted(first_epoch) == sorted(expected), "an epoch of the new data, each sample once"
    assert (end.batches, end.epoch) == (12, 2)

    head, middle = keys_of(changed, state, 4)
    tail, last = keys_of(open_data(pattern, tmp_path / "i", **options), again(middle), 5)
    assert head + tail == whole and last == end, "a resume inside the new era"


@SHUFFLES
def test_an_era_at_an_epochs_edge_begins_that_epoch(tmp_path: Path, shuffle: str) -> None:
    pattern = write_shards(tmp_path, 16, per_shard=4)
    data = open_data(pattern, tmp_path / "i", shuffle=shuffle)
    _, state = keys_of(data, data.start(), 2)
    assert (state.epoch, state.batch) == (1, 0)
    write_shards(tmp_path, 20, per_shard=4)
    changed = open_data(pattern, tmp_path / "i", shuffle=shuffle, new_era=True)
    begun = changed.admit(state)
    assert (begun.epoch, begun.window, begun.batch) == (1, 0, 0)
    assert begun.cursors == (((1, 0, 0),) if shuffle == "window" else (20,))


@pytest.mark.cases(slow="window")
@SHUFFLES
def test_epochs_of_other_data_count_from_where_they_begin(tmp_path: Path, shuffle: str) -> None:
    """40 samples are 5 steps an epoch, 16 are 2; 8 steps are one epoch and a part."""

    def training(epochs: int | None, max_steps: int | None = None) -> Any:
        return SimpleNamespace(num_epochs=epochs, max_steps=max_steps)

    options: dict[str, Any] = {"shuffle": shuffle, "new_era": True}
    pattern = write_shards(tmp_path, 40, per_shard=8)
    data = open_data(pattern, tmp_path / "i", **options)
    assert total_steps(training(3), data, None) == 15
    for steps in (1, 4, 5, 8, 15):
        assert total_steps(training(3), data, keys_of(data, data.start(), steps)[1]) == 15
    _, early = keys_of(data, data.start(), 8)
    _, late = keys_of(data, data.start(), 12)

    for path in sorted(tmp_path.glob("s-*.tar"))[2:]:
        path.unlink()
    changed = open_data(pattern, tmp_path / "i", **options)
    assert changed.steps_per_epoch() == 2
    assert total_steps(training(3), changed, early) == 8 + 2, "epoch 2 is of the new data"
    assert total_steps(training(5), changed, late) == 12 + 2 * 2
    _, inside = keys_of(changed, late, 1)
    assert inside.eras[-1].start_batch == 12 < inside.batches
    assert total_steps(training(5), changed, inside) == 12 + 2 * 2, "a resume in the new era"
    with pytest.raises(RecipeError, match=r"num_epochs: 3.*after 12 steps.*4 or more.*max_steps"):
        total_steps(training(3), changed, late)
    assert total_steps(training(None, 100), changed, late) == 100


@SHUFFLES
@pytest.mark.parametrize("change", [{"seed": 8}, {"global_batch_size": 4}, {"over_long": "drop"}])
def test_another_order_is_never_an_era(
    tmp_path: Path, shuffle: str, change: dict[str, Any]
) -> None:
    pattern = write_shards(tmp_path, 16, per_shard=4)
    state = open_data(pattern, tmp_path / "i", shuffle=shuffle).start()
    write_shards(tmp_path, 20, per_shard=4)
    options: dict[str, Any] = {"shuffle": shuffle, "new_era": True, **change}
    with pytest.raises(RunIdentityError, match=next(iter(change))):
        open_data(pattern, tmp_path / "i", **options).admit(state)


def test_other_weights_are_an_era(tmp_path: Path) -> None:
    def data_with(weight: float) -> TrainData:
        sources = tuple(
            Source(name=name, path=str(tmp_path / name / "s-*.tar"), weight=w)
            for name, w in (("a", 1.0), ("b", weight))
        )
        options: dict[str, Any] = {
            "epoch_size": 32,
            "new_era": True,
        }  # its old name
        return open_data("", tmp_path / "i", sources=sources, shuffle="window", **options)

    for name, start in (("a", 0), ("b", 100)):
        write_shards(tmp_path / name, 16, per_shard=4, start=start)
    data = data_with(1.0)
    _, state = keys_of(data, data.start(), 1)
    keys, end = keys_of(data_with(3.0), state, 4)
    assert sum(key < key_of(100) for batch in keys for key in batch) == 8
    assert [era.start_batch for era in end.eras] == [0, 1]
    assert "weight 3.0" in str(end.identity["data.train.b"])
    assert "weight 1.0" in str(end.eras[0].identity["data.train.b"])


def test_old_eras_are_folded_where_the_state_would_grow() -> None:
    """Thirty changes of six sources with long names."""

    def identity(change: int) -> dict[str, Any]:
        sources = {
            f"data.train.{'source-with-a-long-name-' * 2}{n}"[:50] + str(n): (
                f"1000 shards, {10**12 + change} bytes, weight 0.333333, {change:016x}"
            )
            for n in range(6)
        }
        return {"data.seed": 1, "data.shuffle": "window", "packing.mode": "in_batch", **sources}

    cursors = tuple((3, 999, 4095) for _ in range(6))
    state = DataState(0, 0, 0, 0, cursors, (Era(0, identity(0)),))
    for change in range(1, 31):
        moved = DataState(change, 2, 5, change * 1000, cursors, state.eras)
        state = start_era(moved, identity(change), epoch=change, cursors=cursors)
        assert len(state.to_json()) < MAX_STATE_BYTES
        assert state.identity == identity(change)
        assert again(state) == state
    starts = [era.start_batch for era in state.eras]
    assert starts[0] == 0 and starts[-1] == 30_000 and starts == sorted(starts)
    assert "folded" in state.eras[0].identity
    assert state.eras[-2].identity.get("data.seed") is None, "only what differs is kept"
    assert len(state.eras) >= 3, "the last change stays readable"


def test_sixteen_sources_in_windows_stay_under_two_kilobytes(tmp_path: Path) -> None:
    sources = tuple(
        Source(
            name=f"a-source-with-a-rather-long-name-{n}",
            path=write_shards(tmp_path / str(n), 2, per_shard=1),
            weight=n + 0.123456789,
        )
        for n in range(16)
    )
    options: dict[str, Any] = {"shuffle": "window", "epoch_size": 100}
    for some in (sources, sources[:6]):
        data = open_data("unused", tmp_path / "i", sources=some, **options)
        _, state = keys_of(data, data.start(), 5)
        assert state.window > 0 and max(cursor[0] for cursor in state.cursors) > 0  # type: ignore[index]
        assert len(state.to_json()) < 2048
        assert again(state) == state
