"""GIF, BMP and TIFF members are images; one that no turn shows may stand beside a sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.shard_fakes import chat_json, image_bytes, write_shard

from vlmpack.data.index import parts
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


def test_parts_of_versions_that_could_not_read_them_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those that had a bad sample: the others are as they were."""
    gif = {"json": chat_json("Q", "A", 1), "0.jpg": image_bytes(20, 10, kind="GIF")}
    png = {"json": chat_json("Q", "A", 1), "0.png": image_bytes(20, 10)}
    bad, good = (
        write_shard(tmp_path / f"{name}.tar", [("a", fields)])
        for name, fields in (("bad", gif), ("good", png))
    )
    with monkeypatch.context() as before:
        before.setattr(parts, "_READ_NOW", b"pairs")
        before.setattr("vlmpack.data.shards.images.IMAGE_FORMATS", ("JPEG", "PNG", "WEBP"))
        old = [index_of(shard, tmp_path / "i") for shard in (bad, good)]
    assert [index.table.column("error_class").to_pylist() for index in old] == [["decode"], [None]]
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "i").glob("*.part")}
    assert len(made) == 2
    new = [index_of(shard, tmp_path / "i") for shard in (bad, good)]
    assert [index.table.column("reason").to_pylist() for index in new] == [[None], [None]]
    assert new[0].table.column("images").to_pylist()[0][0]["format"] == "GIF"
    written = [path for path in made if path.stat().st_mtime_ns != made[path]]
    assert [path.name.partition(".")[0] for path in written] == ["bad"]
