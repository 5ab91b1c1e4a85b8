"""GIF, BMP and TIFF members are images; one that no turn shows may stand beside a sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.shard_fakes import chat_json

from vlmpack.data.index.parts import BuildSettings
from vlmpack.data.index.shard_index import IndexBuilder, ShardIndex, open_index
from vlmpack.data.shards.samples import cook_text
from vlmpack.errors import DataError
from vlmpack.storage.fetch import LocalFetcher

BUILDER = IndexBuilder(LocalFetcher())


def index_of(shard: Path, folder: Path) -> ShardIndex:
    [index] = open_index([str(shard)], BUILDER, BuildSettings(directory=folder))
    return index


@pytest.mark.parametrize(
    ("fields", "shown", "wanted"),
    [
        (["gif"], 1, ["gif"]),
        (["0.bmp", "1.tif", "2.tiff"], 3, ["0.bmp", "1.tif", "2.tiff"]),
        (["0.jpg", "1.gif"], 2, ["0.jpg", "1.gif"]),
        (["0.jpg", "mask.gif"], 1, ["0.jpg"]),
        (["mask.tif", "0.jpg", "1.png"], 2, ["0.jpg", "1.png"]),
        (["preview.gif"], 0, []),
        (["0.jpg", "1.gif", "2.gif"], 2, None),
        (["0.jpg", "1.png"], 1, None),
    ],
)
def test_which_members_the_turns_show(fields: list[str], shown: int, wanted: Any) -> None:
    document = chat_json("Q", "A", shown)
    if wanted is None:
        with pytest.raises(DataError, match=r"image placeholder.* in the conversation, but"):
            cook_text("k", "s", document, fields)
        return
    assert list(cook_text("k", "s", document, fields).image_fields) == wanted


def test_one_that_is_named_is_shown() -> None:
    part = {"type": "image", "image": "mask.gif"}
    turns = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "A"}]
    document = json.dumps({"messages": turns}).encode()
    assert cook_text("k", "s", document, ["mask.gif"]).image_fields == ("mask.gif",)
    with pytest.raises(DataError, match=r"1 image placeholder .* 2 image members"):
        cook_text("k", "s", document, ["0.jpg", "mask.gif"])
