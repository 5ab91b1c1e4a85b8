"""Packs of samples with videos: a plan trains them as mode online does, the others refuse them
before anything is encoded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.images import file_of
from support.packed_splits import pack
from support.shard_fakes import config_for, write_shard
from support.shards import TINY_MODEL
from support.videos import Shot, Told

from vlmpack.data.pipeline import TrainData
from vlmpack.encode import Encoder
from vlmpack.errors import DataError
from vlmpack.packing.budget import RowBudget

SIZE = (112, 112)
MOST = 256


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine samples; every third shows a video."""
    told = []
    for number in range(9):
        shown = Shot(SIZE, 4, fps=2.0, seed=number) if number % 3 == 2 else SIZE
        told.append(Told(f"s{number}", (shown, f"what {number}"), "abc" * (number + 1)))
    samples = [
        (
            each.key,
            {"json": each.document()} | {n: file_of(one) for n, one in each.files().items()},
        )
        for each in told
    ]
    return write_shard(tmp_path_factory.mktemp("videos") / "s.tar", samples)


def opened(shard: Path, **changes: Any) -> TrainData:
    settings = {
        "mode": "online",
        "micro_batch_size": 1,
        "global_batch_size": 2,
        "seq_length": MOST,
        "budget": RowBudget(max_tokens=MOST, alignment=4),
    }
    config = config_for(str(shard), shard.parent / "index", **(settings | changes))
    return TrainData.open(config, Encoder(TINY_MODEL))


def rows_of(data: TrainData) -> list[Any]:
    state = data.start()
    steps = data.steps_until(1, state)
    found = data.batches(state, rank=0, dp=1, max_steps=steps)
    return [micro.batch for step in found for micro in step.micro_batches]


@pytest.mark.slow
def test_a_plan_trains_videos_as_online_does(shard: Path, tmp_path: Path) -> None:
    saved = tmp_path / "packs"
    manifest = pack(opened(shard), saved, kind="plan")
    assert manifest.num_samples == 9
    theirs = rows_of(opened(shard))
    ours = rows_of(opened(shard, mode="offline", path=str(saved), max_tokens=MOST))
    assert len(ours) == len(theirs) > 1
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.position_ids, other.position_ids)
        assert one.media.seconds == other.media.seconds
        assert torch.equal(one.media.pixel_values, other.media.pixel_values)
    assert any(step is not None for row in ours for step in row.media.seconds or ())


@pytest.mark.parametrize("kind", ["tokens", "shards"])
def test_a_video_is_refused_before_anything_is_encoded(
    shard: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = opened(shard)
    rows_of(data)  # its lengths are counted, as a run before it did

    def encoded(*_: Any, **__: Any) -> None:
        raise AssertionError("a sample was encoded")

    monkeypatch.setattr(Encoder, "encode", encoded)
    with pytest.raises(
        DataError, match=r"the sample has a video.*Use vlmpack pack --kind plan"
    ) as told:
        pack(data, tmp_path / "packs", kind=kind)
    assert (told.value.error_class, told.value.key, told.value.shard) == (
        "schema",
        "s2",
        str(shard),
    )
    assert not [*(tmp_path / "packs").iterdir()]


def test_videos_that_are_left_out_are_holes(shard: Path, tmp_path: Path) -> None:
    copied = shutil.copy(shard, tmp_path / "s.tar")
    data = opened(Path(copied), on_error={"schema": "skip"})
    manifest = pack(data, tmp_path / "packs", kind="tokens")
    assert (manifest.num_samples, manifest.num_holes) == (9, 3)
