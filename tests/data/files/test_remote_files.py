"""Files of records in a store, their images by reference in the same store: as from a disk."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.record_data import COUNT, write_records
from support.s3_emulator import fill, s3_server
from support.shard_fakes import FakeEncoder, config_for, image_bytes, loading, micro_batches

from vlmpack.data.pipeline import TrainData
from vlmpack.errors import DataError, RecipeError
from vlmpack.recipe.data import StorageSection
from vlmpack.recipe.sources import Source
from vlmpack.storage import RoutingFetcher

KEY = "FILES_IN_A_STORE_KEY"
os.environ[KEY] = "any"
"""For good and before any test: workers see the environment of when the first of them started."""

KINDS = ("jsonl", "csv", "parquet", "arrow")
PLACES = {"arrow": "arrow/train-folder/data-{00000,00001}-of-00002.arrow"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    root = tmp_path_factory.mktemp("served")
    for kind in KINDS:
        write_records(root / "bucket" / kind, kind, range(COUNT))
    with s3_server(root) as endpoint:
        yield endpoint, root


@pytest.fixture
def fetcher(served: tuple[str, Path]) -> RoutingFetcher:
    keys = dict.fromkeys(("access_key_id", "secret_access_key"), f"${{env:{KEY}}}")
    section = StorageSection(
        endpoint=served[0], region="us-east-1", allow_private=True, credentials=keys
    )
    return RoutingFetcher(section)


def opened(
    path: str, index_dir: Path, fetcher: RoutingFetcher | None = None, **changes
) -> TrainData:
    source = Source(name="d", path=path, image_root=changes.pop("image_root", None))
    config = config_for("", index_dir, sources=(source,), shuffle="global", **changes)
    return TrainData.open(config, FakeEncoder(), fetcher=fetcher)


@pytest.mark.cases(slow=("0-jsonl", "0-parquet"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_file_in_a_store_is_the_file_on_disk(
    served: tuple[str, Path], fetcher: RoutingFetcher, tmp_path: Path, kind: str, workers: int
) -> None:
    name = PLACES.get(kind, f"{kind}/train.{kind}")
    ours = opened(f"s3://bucket/{name}", tmp_path / "a", fetcher, **loading(workers))
    theirs = opened(str(served[1] / "bucket" / name), tmp_path / "b")
    one, two = micro_batches(ours, 5), micro_batches(theirs, 5)
    assert [[s.key for s in m.samples] for m in one] == [[s.key for s in m.samples] for m in two]
    assert not [hole for m in one for hole in m.skipped]
    pixels = [m.batch.media.pixel_values for m in one if m.batch.media is not None]
    others = [m.batch.media.pixel_values for m in two if m.batch.media is not None]
    assert len(pixels) == len(others) > 2
    assert all(p.equal(q) for p, q in zip(pixels, others, strict=True))
    # Two arrow files have their images inside; of the others each is a file of the store.
    stamps = ours.fitted.table.image_stamps
    assert (stamps is None) == (kind == "arrow")


@pytest.mark.slow
def test_an_image_that_another_version_took_the_place_of_is_an_error(
    served: tuple[str, Path], fetcher: RoutingFetcher, tmp_path: Path
) -> None:
    folder = tmp_path / "more" / "changing"
    write_records(folder, "jsonl", range(COUNT))
    fill(served[0], tmp_path / "more")
    policy = {"integrity": "skip"}
    data = opened("s3://changing/train.jsonl", tmp_path / "i", fetcher, on_error=policy)
    (folder / "pictures" / "4-0.png").write_bytes((folder / "pictures" / "1-0.png").read_bytes())
    fill(served[0], tmp_path / "more")
    refs = [data.ref(number) for number in range(COUNT)]
    found = data.dataset.reader.read_all(refs)
    [fault] = [each for each in found if isinstance(each, DataError)]
    assert fault.key == "000000004" and fault.error_class == "integrity"
    # What the index holds of its version is what tells; a stamp of now reads the other bytes.
    now = replace(refs[4].images[0], version=fetcher.head(refs[4].images[0].path).version)
    assert now != refs[4].images[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../x.png", "/x.png", "https://elsewhere/x.png", "a//b.png"])
def test_an_image_outside_of_the_root_is_refused(
    served: tuple[str, Path], fetcher: RoutingFetcher, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "x.jsonl"
    turns = '[{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "a"}]'
    path.write_text(f'{{"messages": {turns}, "images": ["{name}"]}}\n')
    with pytest.raises(DataError, match="is no path inside s3://bucket/jsonl/"):
        opened(
            str(path),
            tmp_path / "i",
            fetcher,
            image_root="s3://bucket/jsonl",
            on_error={"integrity": "raise"},
        )


def test_an_image_that_is_out_of_reach_ends_the_indexing_and_is_named(
    served: tuple[str, Path], fetcher: RoutingFetcher, tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    turns = '[{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "a"}]'
    path.write_text(f'{{"messages": {turns}, "images": ["pictures/none.png"]}}\n')
    with pytest.raises((DataError, RecipeError), match=r"none\.png"):
        opened(
            str(path),
            tmp_path / "i",
            fetcher,
            image_root="s3://bucket/jsonl",
            on_error={"integrity": "skip", "transport": "skip"},
        )


def test_images_inside_of_a_record_stand_beside_those_of_the_store(
    served: tuple[str, Path], fetcher: RoutingFetcher, tmp_path: Path
) -> None:
    inside = base64.b64encode(image_bytes(9, 9)).decode()
    names = ["pictures/1-0.png", f"data:image/png;base64,{inside}", "pictures/2-1.png"]
    turns = [{"role": "user", "content": "<image>" * 3}, {"role": "assistant", "content": "a"}]
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": turns, "images": names}) + "\n")
    data = opened(str(path), tmp_path / "i", fetcher, image_root="s3://bucket/jsonl")
    ref = data.ref(0)
    assert [Path(stamp.path).name for stamp in ref.images] == ["1-0.png", "2-1.png"]
    sample = data.dataset.reader.read(ref)
    there = served[1] / "bucket" / "jsonl"
    expected = [(there / names[0]).read_bytes(), image_bytes(9, 9), (there / names[2]).read_bytes()]
    assert list(sample.images) == expected
