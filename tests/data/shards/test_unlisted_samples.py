"""What an index does not list is found in the shard, whatever else lies between its samples."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from support.shard_fakes import key_of, sample_fields, write_shard

from vlmpack.data.index.parts import BuildSettings
from vlmpack.data.index.shard_index import IndexBuilder, open_index
from vlmpack.data.shards.unlisted import unlisted_samples
from vlmpack.errors import DataError
from vlmpack.storage.fetch import LocalFetcher, ShardStamp

FETCHER = LocalFetcher()
COUNT = 9


class CountedReads(LocalFetcher):
    """How many bytes were asked for."""

    num_bytes = 0

    def read(self, stamp: ShardStamp, offset: int, length: int) -> bytes:
        CountedReads.num_bytes += length
        return super().read(stamp, offset, length)


def spans(path: Path) -> tuple[ShardStamp, np.ndarray, np.ndarray]:
    settings = BuildSettings(directory=path.parent / "i")
    (index,) = open_index([str(path)], IndexBuilder(FETCHER), settings)
    columns = [index.table.column(name).to_numpy() for name in ("offset", "length")]
    return index.stamp, columns[0], columns[1]


@pytest.fixture(scope="module", params=["plain", "mixed"])
def shard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """COUNT samples; in `mixed`, folders and files that belong to no sample lie everywhere."""
    path = tmp_path_factory.mktemp("unlisted") / "s.tar"
    if request.param == "plain":
        return write_shard(path, [(key_of(n), sample_fields(n)) for n in range(COUNT)])
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(COUNT):
            folder = tarfile.TarInfo(f"d{number}")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
            for name, data in sample_fields(number).items():
                for full in (f"._{number}.{name}", f"{'long/' * 40}{key_of(number)}.{name}"):
                    entry = tarfile.TarInfo(full)
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
    return path


def test_an_honest_index_leaves_nothing(shard: Path) -> None:
    stamp, offsets, lengths = spans(shard)
    assert offsets.shape == (COUNT,)
    assert unlisted_samples(FETCHER, stamp, offsets, lengths) == []
    CountedReads.num_bytes = 0
    assert unlisted_samples(CountedReads(), stamp, offsets, lengths) == []
    assert 0 < CountedReads.num_bytes == stamp.size - lengths.sum()


@pytest.mark.parametrize("lost", [[0], [4], [8], [3, 4, 5], [0, 8], list(range(COUNT))])
def test_every_lost_sample_is_named(shard: Path, lost: list[int]) -> None:
    stamp, offsets, lengths = spans(shard)
    kept = np.asarray([n for n in range(COUNT) if n not in lost], dtype=np.int64)
    keys = unlisted_samples(FETCHER, stamp, offsets[kept], lengths[kept])
    assert [key.rpartition("/")[2] for key in keys] == [key_of(n) for n in lost]


def test_spans_of_another_shard_are_refused(shard: Path) -> None:
    stamp, offsets, lengths = spans(shard)
    for wrong in (offsets + 512, offsets + 1, offsets - 512, offsets * 2):
        with pytest.raises(DataError, match=r"s\.tar"):
            unlisted_samples(FETCHER, stamp, wrong, lengths)
    with pytest.raises(DataError, match="overlap"):
        unlisted_samples(FETCHER, stamp, offsets, lengths * 2)
    cut = ShardStamp(stamp.path, int(offsets[-1] + lengths[-1]), stamp.version)
    with pytest.raises(DataError):
        unlisted_samples(FETCHER, cut, offsets, lengths)
