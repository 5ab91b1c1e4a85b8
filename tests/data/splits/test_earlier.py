"""Runs and packs that an earlier version began, whose text behind videos had other positions: they
go on where there is no video, and are refused by its name where there is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.images import file_of
from support.packed_splits import pack
from support.shard_fakes import open_data, write_shard
from support.shards import TINY_MODEL
from support.videos import Shot, Told

from vlmpack.data.packs.manifest import read_manifest
from vlmpack.data.pipeline import TrainData
from vlmpack.encode import Encoder
from vlmpack.errors import PacksError, RunIdentityError
from vlmpack.packing.budget import RowBudget

SIZE = (112, 112)
MOST = 256


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Nine samples in three shards; of `videos` the last one shows a video."""
    folder = tmp_path_factory.mktemp("earlier")
    for name in ("stills", "videos"):
        (folder / name).mkdir()
        for first in (0, 3, 6):
            told = [
                Told(f"s{n}", (_shown(name, n), 'what "frames"'), "abc" * (n + 1))
                for n in range(first, first + 3)
            ]
            samples = [
                (
                    one.key,
                    {"json": one.document()} | {n: file_of(i) for n, i in one.files().items()},
                )
                for one in told
            ]
            write_shard(folder / name / f"{first}.tar", samples)
    return {name: folder / name for name in ("stills", "videos")}


def _shown(name: str, number: int) -> Any:
    return Shot(SIZE, 4, fps=2.0) if (name, number) == ("videos", 8) else SIZE


def before() -> Encoder:
    """The encoder of the version before."""
    encoder = Encoder(TINY_MODEL)
    encoder.family = replace(encoder.family, video_rule_version=1)
    return encoder


def opened(shards: Path, encoder: Encoder, **changes: Any) -> TrainData:
    settings = {
        "mode": "online",
        "micro_batch_size": 1,
        "global_batch_size": 2,
        "seq_length": MOST,
        "budget": RowBudget(max_tokens=MOST, alignment=4),
        "encoder": encoder,
    }
    return open_data(str(shards / "*.tar"), shards.parent / "index", **(settings | changes))


@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_runs_go_on_where_there_is_no_video(
    shards: dict[str, Path], shuffle: str, caplog: pytest.LogCaptureFixture
) -> None:
    old = opened(shards["stills"], before(), shuffle=shuffle)
    state = next(old.batches(old.start(), rank=0, dp=1, max_steps=1)).state
    wanted = next(old.batches(state, rank=0, dp=1, max_steps=2)).micro_batches[0].samples
    data = opened(shards["stills"], Encoder(TINY_MODEL), shuffle=shuffle, resume=state)
    assert "earlier version" not in caplog.text  # which learnt fewer tokens
    step = next(data.batches(data.admit(state), rank=0, dp=1, max_steps=2))
    assert step.micro_batches[0].samples == wanted
    assert step.state.identity == data.identity != state.identity
    with_video = opened(shards["videos"], before(), shuffle=shuffle)
    with pytest.raises(RunIdentityError, match=r"positions.*the first is s8 in .*6\.tar"):
        opened(shards["videos"], Encoder(TINY_MODEL), shuffle=shuffle, resume=with_video.start())
    # One that this version began goes on.
    today = opened(shards["videos"], Encoder(TINY_MODEL), shuffle=shuffle).start()
    opened(shards["videos"], Encoder(TINY_MODEL), shuffle=shuffle, resume=today)


def test_packs_go_on_where_there_is_no_video(shards: dict[str, Path], tmp_path: Path) -> None:
    for name, kinds in {"stills": ("plan", "tokens", "shards"), "videos": ("plan",)}.items():
        for kind in kinds:
            saved = tmp_path / f"{name}-{kind}"
            pack(opened(shards[name], before()), saved, kind=kind)
            assert read_manifest(saved).encoder["rules"] == before().fingerprint_parts["rules"]
            offline = {"mode": "offline", "path": str(saved), "max_tokens": MOST}
            if name == "stills":
                assert (
                    opened(shards[name], Encoder(TINY_MODEL), **offline).fitted.eligible.sum() == 9
                )
                continue
            with pytest.raises(
                PacksError, match=r"other tokens or positions.*the first is s8 in .*pack again"
            ):
                opened(shards[name], Encoder(TINY_MODEL), **offline)


def test_pairs_have_no_videos_and_keep_their_name() -> None:
    """So what a reference model said of them goes on as well."""
    pairs = Encoder(TINY_MODEL).replace(pairs=True)
    old = Encoder(TINY_MODEL).replace(pairs=True)
    old.family = before().family
    assert pairs.fingerprint == old.fingerprint
    assert pairs.fingerprint_parts == old.fingerprint_parts
    assert Encoder(TINY_MODEL).fingerprint != before().fingerprint
    assert before().fingerprint == Encoder(TINY_MODEL).former.stills[0]
