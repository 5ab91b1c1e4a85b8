"""The state is small, readable JSON and refuses other data with a list of differences."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.shard_fakes import FakeEncoder, open_data, write_shards

from vlmpack.data.plan import batches
from vlmpack.data.plan import state as state_module
from vlmpack.data.plan.state import DataState, Era
from vlmpack.errors import CheckpointError, RunIdentityError
from vlmpack.recipe.sources import Source


@pytest.fixture
def pattern(tmp_path: Path) -> str:
    return write_shards(tmp_path, 20, per_shard=5)


def test_json_round_trip_under_two_kilobytes(pattern: str, tmp_path: Path) -> None:
    state = open_data(pattern, tmp_path / "i").start()
    text = state.to_json()
    assert len(text) < 2048
    assert DataState.from_json(text) == state
    assert json.loads(text)["eras"][0]["identity"]["data.seed"] == 7


def test_many_sources_stay_under_two_kilobytes(tmp_path: Path) -> None:
    sources = tuple(
        Source(
            name=f"a-source-with-a-rather-long-name-number-{n}" * 2,
            path=write_shards(tmp_path / str(n), 3, per_shard=3),
            weight=n + 0.123456789,
        )
        for n in range(12)
    )
    for some in (sources, sources[:6]):
        data = open_data("unused", tmp_path / "i", sources=some)
        assert len(data.start().to_json()) < 2048


WRITTEN = {
    (1, False): "897d80f58fb1f14f",
    (1, True): "650035992f7bf223",
    (7, False): "04e46cfa0141b492",
    (7, True): "9b13c5b0ab33fc41",
    (64, False): "66987bef0591458f",
    (64, True): "b0dccaf1d8922939",
}
"""Digests of states as they were written before those of many sources were shortened."""


def state_of(count: int, *, shards: bool) -> DataState:
    """A state of so many sources, with cursors of 50 shards of 2,000 samples or without shards."""
    draw = random.Random(count)
    cursors = tuple(
        (draw.randrange(3), draw.randrange(50), draw.randrange(2000))
        if shards
        else draw.randrange(10**7)
        for _ in range(count)
    )
    eras = (Era(0, {"data.train": f"{count} sources"}),)
    return DataState(1, 7, 3, 4567, cursors, eras, "abc" if shards else None)


def test_states_of_few_sources_are_those_of_earlier_versions() -> None:
    found = {
        (count, shards): hashlib.blake2b(
            state_of(count, shards=shards).to_json().encode(), digest_size=8
        ).hexdigest()
        for count, shards in WRITTEN
    }
    assert found == WRITTEN


@pytest.mark.parametrize("count", [65, 500, 1000])
def test_cursors_of_many_sources_are_exact_in_three_bytes_each(count: int) -> None:
    state = state_of(count, shards=True)
    text = state.to_json()
    assert DataState.from_json(text) == state
    assert len(text) < 200 + 3 * count
    at_start = replace(state, cursors=tuple((0, 0, 0) for _ in range(count)))
    assert DataState.from_json(at_start.to_json()) == at_start
    older = state_of(count, shards=False)
    assert DataState.from_json(older.to_json()) == older, "as earlier versions wrote it"
    value = json.loads(text)
    _, passes, places, samples, number = value["cursors"].split(" ")
    for wrong in (
        f"{count - 1} {passes} {places} {samples} {number}",
        f"{10**12} {passes} {places} {samples} {number}",
        f"{count} {passes} {places} {number}",
        f"{count} {passes} 0 {samples} {number}",
        f"{count} {passes} {places} {samples} '",
        "",
    ):
        with pytest.raises(CheckpointError, match="the data state cannot be read"):
            DataState.from_json(json.dumps(value | {"cursors": wrong}))


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("shuffle", ["global", "window"])
@pytest.mark.parametrize("weight", [None, 0.3])
def test_a_run_of_many_sources_goes_on_from_every_batch(
    tmp_path: Path, shuffle: str, weight: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (batches, state_module):
        monkeypatch.setattr(module, "MANY_SOURCES", 2)
    sources = tuple(
        Source(
            name=f"s{n}",
            path=write_shards(tmp_path / str(n), 20 + n, per_shard=6),
            weight=None if weight is None else weight * (n + 1),
        )
        for n in range(3)
    )
    size = None if weight is None else 66
    data = open_data("unused", tmp_path / "i", sources=sources, shuffle=shuffle, epoch_size=size)
    places = [data.start()]
    whole = []
    for planned in data.planned(data.start(), 24):
        whole.append((planned.position, planned.bins))
        after, before = planned.following, places[-1]
        state = replace(
            before,
            epoch=after.epoch,
            window=after.window,
            batch=after.batch,
            batches=before.batches + 1,
            cursors=planned.cursors,
            shards=planned.shards,
        )
        places.append(state)
    assert whole[-1][0].epoch > 0 and len({place.window for place in places}) > 1, "vacuous"
    assert isinstance(
        json.loads(places[5].to_json())["cursors"], str if shuffle == "window" else list
    )
    for done, state in enumerate(places[:-1]):
        again = data.admit(DataState.from_json(state.to_json()))
        rest = [(one.position, one.bins) for one in data.planned(again, 24)]
        assert rest == whole[done:]


@pytest.mark.cases(quick=("*0-*", "*5-*"), slow="*4-*")
@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"seed": 8}, ["data.seed: the run has 7, now 8"]),
        ({"seq_length": 999, "global_batch_size": 4}, ["training.seq_length", "global_batch_size"]),
        ({"shuffle": "window"}, ["data.shuffle: the run has 'global', now 'window'"]),
        ({"encoder": FakeEncoder(fingerprint="other")}, ["encoder"]),
        ({"over_long": "drop"}, ["data.over_long"]),
        ({"mode": "none"}, ["packing.mode"]),
    ],
)
def test_other_settings_are_refused_readably(
    pattern: str, tmp_path: Path, changes: dict[str, object], names: list[str]
) -> None:
    state = open_data(pattern, tmp_path / "i").start()
    other = open_data(pattern, tmp_path / "i", **changes)
    with pytest.raises(RunIdentityError) as caught:
        next(other.batches(state, rank=0, dp=1, max_steps=1))
    for name in names:
        assert name in str(caught.value)


def test_other_data_is_refused_with_its_counts(pattern: str, tmp_path: Path) -> None:
    state = open_data(pattern, tmp_path / "i").start()
    write_shards(tmp_path, 21, per_shard=5)
    with pytest.raises(RunIdentityError, match=r"4 shards, 20 samples.*5 shards, 21 samples"):
        open_data(pattern, tmp_path / "i").admit(state)


def test_free_settings_may_change(pattern: str, tmp_path: Path) -> None:
    state = open_data(pattern, tmp_path / "i").start()
    open_data(pattern, tmp_path / "j", micro_batch_size=2).admit(state)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", '{"vlmpack_format": 99}', '{"vlmpack_format": 1, "epoch": "x"}'],
)
def test_unreadable_states(text: str) -> None:
    with pytest.raises(CheckpointError, match="data state"):
        DataState.from_json(text)
