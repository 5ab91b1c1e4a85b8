"""The state is small, readable JSON and refuses other data with a list of differences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.shard_fakes import FakeEncoder, open_data, write_shards

from vlmpack.data.plan.state import DataState
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
