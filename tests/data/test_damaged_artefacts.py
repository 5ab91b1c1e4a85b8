"""Index files, saved packs and cached blocks: no flipped bit and no cut is read as something else.

Exhaustive over the last 2,000 bytes in the soak, a share of a hundredth elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.damage import SHARE, TAIL_BYTES, Noticed, damaged_copies, try_damage
from support.packed_splits import PackEncoder, online, pack
from support.shard_fakes import write_shards

from vlmpack.data.index.columns_file import ColumnsFile, open_columns
from vlmpack.data.index.lengths import LengthsBuilder, ShardBuilder, open_lengths
from vlmpack.data.index.parts import SEAL_BYTES, BuildSettings, read_part
from vlmpack.data.index.shard_index import IndexBuilder, open_index
from vlmpack.data.index.table import PackPlace, table_of
from vlmpack.data.index.table_file import open_table
from vlmpack.data.packs.manifest import ARRAYS, MANIFEST, load_arrays, read_manifest
from vlmpack.data.packs.open import check_files, load_pack
from vlmpack.data.packs.spans import PartFacts, SavedSample, facts_path, read_facts, tar_name
from vlmpack.errors import DataError
from vlmpack.storage.cache.block_store import BlockStore
from vlmpack.storage.fetch import LocalFetcher, ShardStamp
from vlmpack.storage.sources import expand_shards

SAMPLES = 40
FETCHER = LocalFetcher()

pytestmark = pytest.mark.usefixtures("few_rows", "quiet")


@pytest.fixture
def quiet() -> Iterator[None]:
    """A line for each damaged file would take most of the time."""
    logger = logging.getLogger("vlmpack")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.fixture(
    params=[pytest.param(SHARE, id="share"), pytest.param(1.0, id="all", marks=pytest.mark.soak)]
)
def share(request: pytest.FixtureRequest) -> float:
    found: float = request.param
    return found


def rows_of(pattern: str, folder: Path) -> tuple[Any, Any]:
    """Index rows and lengths."""
    settings = BuildSettings(directory=folder)
    index = IndexBuilder(FETCHER)
    lengths = LengthsBuilder(index, folder, PackEncoder())
    found = open_index(expand_shards([pattern], key="k"), index, settings)
    return found[0].table.to_pylist(), open_lengths(found, lengths, settings)[0].table().to_pylist()


@pytest.mark.parametrize("kind", ["index", "lengths"])
def test_index_files(tmp_path: Path, kind: str, share: float) -> None:
    pattern = write_shards(tmp_path, SAMPLES, per_shard=SAMPLES)
    truth = rows_of(pattern, tmp_path / "i")
    (part,) = (tmp_path / "i").glob(f"*.{kind}.part")

    def read() -> Any:
        table = read_part(str(part))
        return Noticed if table is None else table.to_pylist()

    found = try_damage(part, read, share=share)
    drawn = sum(1 for _ in damaged_copies(part.read_bytes(), share=share))
    assert found["noticed"] == drawn > 0.75 * share * 9 * TAIL_BYTES and not found["harmless"]
    for _, damaged in damaged_copies(part.read_bytes(), share=share / 100):
        part.write_bytes(damaged)
        assert rows_of(pattern, tmp_path / "i") == truth, "made again"


def test_tables(tmp_path: Path, share: float) -> None:
    """The copy of all parts: a damaged one is made again from them."""
    pattern = write_shards(tmp_path, 40, per_shard=2)
    stamps = [FETCHER.head(path) for path in expand_shards([pattern], key="k")]
    lengths = LengthsBuilder(IndexBuilder(FETCHER), tmp_path / "i", PackEncoder())
    builder, settings = ShardBuilder.of(lengths), BuildSettings(directory=tmp_path / "i")

    def columns(file: ColumnsFile) -> Any:
        file.check()
        table = table_of(file, [stamps])
        numbers = (table.offsets, table.lengths, table.crc32s, table.num_tokens, table.openings)
        return [each[:].tolist() for each in numbers if each is not None], table.keys[:]

    truth = columns(open_table(stamps, builder, settings))
    (path,) = (tmp_path / "i").glob("*.table")

    def read() -> Any:
        file = open_columns(path)
        return Noticed if file is None else columns(file)

    found = try_damage(path, read, share=share)
    assert found["noticed"] > 0.9 * share * 9 * TAIL_BYTES and not found["harmless"]
    for _, damaged in damaged_copies(path.read_bytes(), share=share / 100):
        path.write_bytes(damaged)
        assert columns(open_table(stamps, builder, settings)) == truth


@pytest.mark.slow
def test_a_reader_without_the_digest_would_be_caught(tmp_path: Path) -> None:
    """Parquet alone raises errors that nobody should see; test_part_file has the other rows."""
    pattern = write_shards(tmp_path, SAMPLES, per_shard=SAMPLES)
    rows_of(pattern, tmp_path / "i")
    (part,) = (tmp_path / "i").glob("*.index.part")
    part.write_bytes(part.read_bytes()[:-SEAL_BYTES])
    with pytest.raises(
        RuntimeError, match=r"index\.part, bit \d of byte .* flipped: .*Arrow|OSErr"
    ):
        try_damage(part, lambda: pq.ParquetFile(part).read().to_pylist(), share=1.0)


@pytest.fixture
def packs(folder: Path, tmp_path: Path) -> Path:
    pack(online(folder, tmp_path / "i"), tmp_path / "packs", kind="shards")
    return tmp_path / "packs"


@pytest.mark.cases(quick=("share-packs.safetensors", "share-holes.json"), slow="share-pack.json")
@pytest.mark.parametrize("name", [MANIFEST, ARRAYS, "samples.parquet", "holes.json"])
def test_files_of_saved_packs(packs: Path, name: str, share: float) -> None:
    def read() -> Any:
        manifest = read_manifest(packs)
        return manifest, check_files(manifest, packs)

    found = try_damage(packs / name, read, share=share)
    assert (found["noticed"] > 0 and not found["harmless"]) or name == MANIFEST
    if name == MANIFEST:  # blanks, and the spelling of numbers, say nothing
        assert found["noticed"] > 10 * found["harmless"]


def test_tars_of_saved_packs(packs: Path, share: float) -> None:
    manifest = read_manifest(packs)
    _, spans = load_arrays(packs / ARRAYS, (packs / ARRAYS).read_bytes())
    assert spans is not None
    tar = packs / tar_name(0)
    stamp = ShardStamp(str(tar), tar.stat().st_size, "")
    mine = (spans.files == 0).nonzero()[0][-2:].tolist()
    places = [
        PackPlace(stamp, *(int(c[n]) for c in (spans.offsets, spans.lengths, spans.crc32s)), 0)
        for n in mine
    ]
    assert sum(place.length for place in places) + 1024 > TAIL_BYTES, "they cover the tar's end"

    def read() -> Any:
        check_files(manifest, packs)
        found = [load_pack(FETCHER, place) for place in places]
        if any(isinstance(pack, DataError) for pack in found):
            return Noticed
        return [[_plain(sample) for sample in pack] for pack in found]

    found = try_damage(tar, read, share=share)
    assert found["noticed"] > 4 * share * TAIL_BYTES and found["harmless"] > 0, "the zeros behind"
    FETCHER.close()


def _plain(sample: SavedSample | None) -> Any:
    if sample is None:
        return None
    tokens = sample.tokens
    return tokens.key, tokens.input_ids.tolist(), tokens.labels.tolist(), sample.images


def test_facts_of_a_tar_that_packing_goes_on_from(
    folder: Path, tmp_path: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged one is no fact: the tar is written again."""
    monkeypatch.setattr("vlmpack.data.packs.write._finish", lambda *arguments: None)
    pack(online(folder, tmp_path / "i"), tmp_path / "packs", kind="tokens")

    def read() -> PartFacts | type[Noticed]:
        return read_facts(tmp_path / "packs", 0) or Noticed

    found = try_damage(tmp_path / "packs/packs-000000.json", read, share=share)
    assert found["noticed"] > 20 * found["harmless"]


@pytest.mark.parametrize("size", [TAIL_BYTES // 2, 40_000])
def test_cached_blocks(tmp_path: Path, size: int, share: float) -> None:
    data = bytes(number % 251 for number in range(size))
    name = "ab" * 16
    BlockStore(tmp_path, 1 << 20).write(name, data)
    (path,) = tmp_path.glob("blocks/*/*")

    def read() -> Any:
        return BlockStore(tmp_path, 1 << 20).read(name, size, 0, size) or Noticed

    found = try_damage(path, read, share=share)
    assert found["noticed"] > 0.9 * share * 9 * min(size, TAIL_BYTES) and not found["harmless"]


@pytest.mark.parametrize("text", ["", "[]", "1", '{"a":' * 5000, '{"digest": "x"}'])
def test_facts_of_a_pack_that_are_none_are_made_again(tmp_path: Path, text: str) -> None:
    (tmp_path / tar_name(0)).touch()
    facts_path(tmp_path, 0).write_text(text)
    assert read_facts(tmp_path, 0) is None
