"""A reader's memory is flat: nothing is kept of the samples that went by."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from support.fault_server import FaultServer
from support.shard_fakes import (
    FakeEncoder,
    chat_json,
    config_for,
    image_bytes,
    write_shard,
)

from vlmpack.data.loading.loader import BinRequest, MicroBatch
from vlmpack.data.pipeline import TrainData
from vlmpack.recipe.data import CacheSection, StorageSection
from vlmpack.storage import RoutingFetcher
from vlmpack.storage.cache.cached import BlockUse, CachedFetcher

IN_SHARD = 50


def resident_bytes() -> int:
    """Of this process, now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    "samples",
    [pytest.param(2_000, marks=pytest.mark.slow), pytest.param(100_000, marks=pytest.mark.soak)],
)
def test_memory_stays_flat(tmp_path: Path, samples: int) -> None:
    """Over a server and a cache too small for the data: blocks come and go all the time."""
    image = image_bytes(120, 90)
    fields = {"json": chat_json("question", "answer", 1), "0.png": image}
    for shard in range(4):
        keys = (f"{shard}-{number}" for number in range(IN_SHARD))
        write_shard(tmp_path / f"bucket/s-{shard}.tar", ((key, fields) for key in keys))
    with FaultServer(tmp_path) as server:
        stores = RoutingFetcher(StorageSection(allow_private=True))
        cache = CacheSection(directory=str(tmp_path / "cache"), max_bytes=4 << 20)
        fetcher = CachedFetcher(stores, cache, BlockUse(block_bytes=1 << 18))
        names = tuple(f"{server.url}/bucket/s-{shard}.tar" for shard in range(4))
        config = config_for(names, tmp_path / "i", shuffle="window")
        data = TrainData.open(config, FakeEncoder(), fetcher=fetcher)
        refs = [data.fitted.table.ref(number) for number in range(4 * IN_SHARD)]
        sizes = []
        for turn in range(samples // 10):
            at = turn * 10 % len(refs)
            micro = data.dataset[BinRequest(tuple(refs[at : at + 10]))]
            assert isinstance(micro, MicroBatch) and len(micro.samples) == 10
            if turn % (samples // 100) == 0:
                sizes.append(resident_bytes())
                server.reset()  # its own notes lie in this process
        stores.close()
    assert fetcher.counters.fetched_bytes > 2 * 4 * IN_SHARD * len(image), "the cache never turned"
    half = len(sizes) // 2
    first, last = max(sizes[:half]) / 2**20, max(sizes[half:]) / 2**20
    print(f"{samples} samples: at most {first:.1f} MiB in the first half, {last:.1f} in the second")
    assert max(sizes[half:]) - max(sizes[:half]) < 16 << 20
