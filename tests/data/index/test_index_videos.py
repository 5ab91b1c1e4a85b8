"""The first video of a split is found by its text, whatever else says `frames`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.images import file_of
from support.shard_fakes import open_data, write_shard
from support.shards import TINY_MODEL
from support.videos import Shot, Told

from vlmpack.data.index.shard_index import IndexBuilder
from vlmpack.data.packs.spans import first_video
from vlmpack.data.splits.survey import build_settings
from vlmpack.encode import Encoder

SIZE = (112, 112)


@pytest.mark.parametrize("place", [None, 1, 3])
def test_the_first_video_is_named(tmp_path: Path, place: int | None) -> None:
    told = [
        Told(f"s{n}", (Shot(SIZE, 2, fps=1.0) if n == place else SIZE, 'a "frames"?'), "abc")
        for n in range(4)
    ]
    told[0] = Told("s0", ("words alone",), "abc")
    for first in (0, 2):
        samples = [
            (one.key, {"json": one.document()} | {n: file_of(i) for n, i in one.files().items()})
            for one in told[first : first + 2]
        ]
        write_shard(tmp_path / f"{first}.tar", samples)
    data = open_data(str(tmp_path / "*.tar"), tmp_path / "i", encoder=Encoder(TINY_MODEL))
    index = IndexBuilder(data.dataset.reader.fetcher, data.config.caps)
    found = first_video(data.fitted, index, build_settings(data.config, None))
    assert (None if found is None else found.key) == (None if place is None else f"s{place}")
