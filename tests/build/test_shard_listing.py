"""A resume on other shards names those that are gone, new or rewritten."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.engines import single_rank
from support.recipes import copy_samples, small_settings
from support.shards import ROOT

from vlmpack.build.data import LISTING_NAME, MAX_NAMED, ShardListing, data_spec, open_split
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.encode import Encoder
from vlmpack.errors import RunIdentityError
from vlmpack.recipe import load_recipe

SOURCE = ROOT / "assets/digits/train-000000.tar"


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"s-{n}.tar" for n in range(9)]
    for number, path in enumerate(found):
        copy_samples(SOURCE, path, 2, skip=2 * number)
    return found


def opened(root: Path, encoder: Encoder, resume: DataState | None = None) -> TrainData:
    recipe = load_recipe(small_settings(root, data__train=str(root / "s-*.tar")))
    spec = data_spec(recipe, encoder, single_rank(), saved=resume)
    listing = ShardListing(root / LISTING_NAME)
    data = open_split(spec, "data.train", Ledger(None), listing=listing)
    assert data is not None
    return data


def refusal(root: Path, encoder: Encoder, state: DataState) -> list[str]:
    with pytest.raises(RunIdentityError) as caught:
        opened(root, encoder, state)
    return str(caught.value).splitlines()


@pytest.mark.slow
def test_a_resume_names_the_shards_that_changed(
    tmp_path: Path, shards: list[Path], encoder: Encoder
) -> None:
    state = opened(tmp_path, encoder).start()
    opened(tmp_path, encoder, state)
    kept = (tmp_path / LISTING_NAME).read_bytes()
    away = tmp_path / "away"
    shutil.move(shards[3], away)
    assert refusal(tmp_path, encoder, state)[-1] == (
        f"gone since the last launch: 1 shard: {shards[3]}"
    )
    copy_samples(SOURCE, shards[4], 1, skip=30)
    shutil.copy(shards[5], tmp_path / "s-x.tar")
    for _ in range(2):  # a refused launch is no launch
        assert refusal(tmp_path, encoder, state)[-3:] == [
            f"gone since the last launch: 1 shard: {shards[3]}",
            f"new since the last launch: 1 shard: {tmp_path}/s-x.tar",
            f"rewritten since the last launch: 1 shard: {shards[4]}",
        ]
    assert (tmp_path / LISTING_NAME).read_bytes() == kept
    for path in shards[: MAX_NAMED + 1]:
        path.unlink(missing_ok=True)
    gone = refusal(tmp_path, encoder, state)[-2]
    assert "gone since the last launch: 6 shards: " in gone and gone.endswith(" and 1 more")
    opened(tmp_path, encoder)
    assert (tmp_path / LISTING_NAME).read_bytes() != kept


@pytest.mark.cases(quick=("None", "{}"), slow="{")
@pytest.mark.parametrize(
    "content",
    [
        *(None, b"", b"[[1]]", b"{", b"\xff", b'[["a", "x", "y"]]', b"{}", b'{"shards": []}'),
        b'{"vlmpack_format": 2, "shards": []}',
    ],
)
def test_without_a_list_the_message_is_shorter(
    tmp_path: Path, shards: list[Path], encoder: Encoder, content: bytes | None
) -> None:
    state = opened(tmp_path, encoder).start()
    shards[0].unlink()
    (tmp_path / LISTING_NAME).unlink()
    if content is not None:
        (tmp_path / LISTING_NAME).write_bytes(content)
    assert refusal(tmp_path, encoder, state)[-1].startswith("Restore these")


def test_a_listing_that_cannot_be_written_ends_no_launch(
    tmp_path: Path, shards: list[Path], encoder: Encoder, caplog: pytest.LogCaptureFixture
) -> None:
    """One rank writes it: the others would wait in the next collective for one that is gone."""
    (tmp_path / LISTING_NAME).mkdir()
    opened(tmp_path, encoder)
    assert f"{LISTING_NAME} cannot be written: " in caplog.text
