"""From launch to the first batch, on 100 shards that nobody has indexed: `ours` or `webdataset`.

A process of its own for bench_data, which waits for the line that it prints: samples, and its CPU
seconds. Nothing is imported that the one or the other does not need.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlmpack.data.pipeline import TrainData
    from vlmpack.data.plan.state import DataState
    from vlmpack.storage import RoutingFetcher
    from vlmpack.storage.cache.cached import CachedFetcher

MANY = 100
BATCH = 8
CACHE_BYTES = 4 << 30
FAKES = Path(__file__).resolve().parent.parent / "tests"


def name_of(number: int) -> str:
    """A shard's name on the server."""
    return f"many-{number:06d}.tar"


def fetcher_for(cache: Path | None) -> CachedFetcher | RoutingFetcher:
    """As a recipe's with remote shards; without a cache where there is no folder for it."""
    from vlmpack.recipe.data import CacheSection, StorageSection
    from vlmpack.storage import RoutingFetcher
    from vlmpack.storage.cache.cached import READ_AHEAD_BYTES, BlockUse, CachedFetcher

    stores = RoutingFetcher(StorageSection(allow_private=True))
    if cache is None:
        return stores
    section = CacheSection(directory=str(cache), max_bytes=CACHE_BYTES)
    return CachedFetcher(stores, section, BlockUse(read_ahead_bytes=READ_AHEAD_BYTES))


def open_data(
    urls: Sequence[str],
    index: Path,
    cache: Path | None,
    *,
    global_batch_size: int = BATCH,
    resume: DataState | None = None,
) -> tuple[TrainData, CachedFetcher | RoutingFetcher]:
    """A split in window order, with the tests' encoder: one token a byte, images really decoded."""
    from vlmpack.alignment import Alignment
    from vlmpack.data.config import DataConfig
    from vlmpack.data.modes import InBatch
    from vlmpack.data.pipeline import TrainData
    from vlmpack.data.splits.survey import DataLaunch
    from vlmpack.packing.budget import RowBudget
    from vlmpack.recipe.data import DataSection
    from vlmpack.recipe.schema import PackingSection, TrainingSection
    from vlmpack.recipe.sources import Source

    sys.path[:0] = [str(FAKES)]
    from support.shard_fakes import FakeEncoder, one_pattern

    config = DataConfig(
        data=DataSection(
            train=(
                Source(name="bench", path=one_pattern(tuple(urls) if len(urls) > 1 else urls[0])),
            ),
            shuffle="window",
            num_workers=0,
            index_dir=str(index),
        ),
        training=TrainingSection(
            micro_batch_size=BATCH, global_batch_size=global_batch_size, seq_length=1 << 20
        ),
        mode=InBatch(
            packing=PackingSection(),
            budget=RowBudget(max_tokens=1 << 20),
            multiples=Alignment(1, 1),
        ),
        num_probed=0,
    )
    fetcher = fetcher_for(cache)
    launch = DataLaunch(resume=resume)
    return TrainData.open(config, FakeEncoder(), fetcher=fetcher, launch=launch), fetcher


def ours(urls: Sequence[str], folder: Path) -> int:
    """Samples of the first micro-batch."""
    data, _ = open_data(urls, folder / "index", folder / "cache")
    step = next(iter(data.batches(data.start(), rank=0, dp=1, max_steps=None)))
    return len(step.micro_batches[0].samples)


def webdataset(urls: Sequence[str]) -> int:
    """As many samples, out of a shuffle buffer, decoded."""
    import webdataset as wds

    commands = [f"pipe:curl -s -f {url}" for url in urls]
    samples = wds.WebDataset(commands, shardshuffle=100).shuffle(1000).decode("pil")
    return len(list(itertools.islice(samples, BATCH)))


if __name__ == "__main__":
    kind, folder, server = sys.argv[1:]
    shards = [f"{server}/bucket/{name_of(number)}" for number in range(MANY)]
    count = ours(shards, Path(folder)) if kind == "ours" else webdataset(shards)
    print(count, sum(os.times()[:2]), flush=True)
    time.sleep(60)  # the reader ends this process
