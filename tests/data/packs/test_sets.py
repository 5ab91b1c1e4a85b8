"""Packs that are cut inside sets: every optimizer step is one of the unpacked run's, whole."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.packed_splits import SIZES, PackEncoder, online, pack
from support.shard_fakes import COUNT, assert_same_tensors, open_data

from vlmpack.data.packs import write
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.packs import PackArrays
from vlmpack.data.plan.state import DataState
from vlmpack.errors import PacksError

pytestmark = pytest.mark.usefixtures("few_rows")
GBS = 9
SETS: dict[str, Any] = {"scope": "batch", "global_batch_size": GBS}

Steps = list[list[tuple[int, ...]]]
"""Samples by step and row."""


def offline(folder: Path, saved: Path, index_dir: Path, **changes: Any) -> TrainData:
    wanted: dict[str, Any] = {"mode": "offline", "path": str(saved), "max_tokens": 64}
    values = {**wanted, "encoder": PackEncoder(), **SIZES, **SETS}
    return open_data(str(folder / "s-*.tar"), index_dir, **(values | changes))


def steps_of(data: TrainData, epochs: int = 1) -> list[Steps]:
    """By epoch."""
    found: list[Steps] = [[] for _ in range(epochs)]
    for batch in data.planned(data.start(), data.steps_until(epochs, data.start())):
        found[batch.position.epoch].append([tuple(sorted(row)) for row in batch.bins])
    return found


def sets_of(steps: Steps) -> list[list[int]]:
    return [sorted(chain.from_iterable(step)) for step in steps]


def unpacked(folder: Path, index_dir: Path, **changes: Any) -> list[list[int]]:
    """The samples of each step of mode `none`."""
    values = {**SIZES, "mode": "none", "micro_batch_size": 3, "global_batch_size": GBS}
    data = open_data(str(folder / "s-*.tar"), index_dir, **(values | changes))
    return sets_of(steps_of(data)[0])


@pytest.mark.cases(quick="plan-stream-window", slow="shards-bfd-global")
@pytest.mark.parametrize(
    ("kind", "planner", "shuffle"),
    [("plan", "stream", "window"), ("plan", "bfd", "global"), ("shards", "bfd", "global")],
)
def test_a_step_trains_what_the_unpacked_one_trains(
    folder: Path, tmp_path: Path, kind: str, planner: str, shuffle: str
) -> None:
    data = online(folder, tmp_path / "i", shuffle=shuffle, **SETS)
    manifest = pack(data, tmp_path / "packs", kind=kind, planner=planner)
    assert (manifest.packs_by_batch, manifest.global_batch_size) == (True, GBS)
    saved = offline(folder, tmp_path / "packs", tmp_path / "i")
    epochs = steps_of(saved, 3)
    sets = sets_of(epochs[0])
    assert [len(members) for members in sets] == [GBS] * (COUNT // GBS) + [COUNT % GBS]
    if shuffle == "global":  # a streamed plan numbers its samples by shard
        assert sets == unpacked(folder, tmp_path / "i")
    assert max(map(len, epochs[0])) > 1, "a step of one row only"
    for later in epochs[1:]:
        assert sorted(sets_of(later)) == sorted(sets), "a set was taken apart"
        assert sorted(map(sorted, later)) == sorted(map(sorted, epochs[0])), "a pack was"
        assert len(sets_of(later)[-1]) == COUNT % GBS, "the short one is the last"
    assert len({str(sets_of(steps)) for steps in epochs}) == 3, "the order stayed"
    assert saved.epoch_length().num_steps == len(sets)
    found = [
        m for s in saved.batches(saved.start(), rank=0, dp=1, max_steps=2) for m in s.micro_batches
    ]
    assert len(found) == len(epochs[0][0]) + len(epochs[0][1])


def test_best_fit_inside_a_set_takes_no_more_packs_than_the_stream(
    folder: Path, tmp_path: Path
) -> None:
    data = online(folder, tmp_path / "i", **SETS)
    for planner in ("stream", "bfd"):
        pack(data, tmp_path / planner, planner=planner)
    stream, bfd = (
        steps_of(offline(folder, tmp_path / planner, tmp_path / "i"))[0]
        for planner in ("stream", "bfd")
    )
    assert sets_of(stream) == sets_of(bfd) == sets_of(steps_of(data)[0])
    assert all(len(a) >= len(b) for a, b in zip(stream, bfd, strict=True))
    assert stream != bfd
    rows = [
        m for s in data.batches(data.start(), rank=0, dp=1, max_steps=7) for m in s.micro_batches
    ]
    saved = offline(folder, tmp_path / "stream", tmp_path / "i")
    again = saved.batches(saved.start(), rank=0, dp=1, max_steps=7)
    for ours, theirs in zip((m for s in again for m in s.micro_batches), rows, strict=True):
        assert_same_tensors(ours, theirs)


def test_another_seed_permutes_the_sets_of_the_first_epoch(folder: Path, tmp_path: Path) -> None:
    pack(online(folder, tmp_path / "i", **SETS), tmp_path / "packs")
    same, other = (
        sets_of(steps_of(offline(folder, tmp_path / "packs", tmp_path / "i", seed=seed))[0])
        for seed in (7, 8)
    )
    assert same != other
    assert sorted(same) == sorted(other)


@pytest.mark.slow
def test_a_state_goes_on_from_any_batch_on_any_number_of_ranks(
    folder: Path, tmp_path: Path
) -> None:
    pack(online(folder, tmp_path / "i", **SETS), tmp_path / "packs", kind="tokens")
    data = offline(folder, tmp_path / "packs", tmp_path / "i")
    total = data.steps_until(2, data.start())
    steps = list(data.batches(data.start(), rank=0, dp=1, max_steps=total))
    whole = [sorted(s.number for m in step.micro_batches for s in m.samples) for step in steps]
    for stop in range(0, total, 4):
        state = DataState.from_json((steps[stop - 1].state if stop else data.start()).to_json())
        assert data.steps_until(2, state) == total - stop
        ranks = [list(data.batches(state, rank=r, dp=3, max_steps=total)) for r in range(3)]
        assert [
            sorted(s.number for share in shares for m in share.micro_batches for s in m.samples)
            for shares in zip(*ranks, strict=True)
        ] == whole[stop:]


def test_sets_of_another_size_and_another_scope_are_refused_by_name(
    folder: Path, tmp_path: Path
) -> None:
    pack(online(folder, tmp_path / "i", **SETS), tmp_path / "sets")
    pack(online(folder, tmp_path / "i"), tmp_path / "stream")
    with pytest.raises(PacksError) as error:
        offline(folder, tmp_path / "sets", tmp_path / "i", global_batch_size=8)
    assert (
        "training.global_batch_size: 9 in the packs, which are cut inside sets of 9 samples, and 8 "
        "in the recipe. For sets of 8 pack again with training.global_batch_size=8"
    ) in str(error.value)
    with pytest.raises(PacksError, match=r"packing.scope: batch in the packs, stream in the reci"):
        offline(folder, tmp_path / "sets", tmp_path / "i", scope="stream")
    with pytest.raises(PacksError, match=r"packing.scope: stream in the packs, batch in the reci"):
        offline(folder, tmp_path / "stream", tmp_path / "i")
    identity = offline(folder, tmp_path / "sets", tmp_path / "i").identity
    assert identity["packing.scope"] == "batch"


def spanning(arrays: PackArrays) -> PackArrays:
    """The first set's last pack takes the second set's first one in."""
    starts = np.delete(arrays.starts, arrays.batches[1])
    batches = arrays.batches - (np.arange(len(arrays.batches)) > 1)
    return PackArrays(arrays.numbers, starts, batches, arrays.windows)


def test_a_pack_that_spans_two_sets_is_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = online(folder, tmp_path / "i", **SETS)
    own = write.choose_packs
    monkeypatch.setattr(write, "choose_packs", lambda *given: spanning(own(*given)))
    pack(data, tmp_path / "packs")
    with pytest.raises(PacksError, match=r"set 0 has 1\d samples, global_batch_size is 9"):
        offline(folder, tmp_path / "packs", tmp_path / "i")
