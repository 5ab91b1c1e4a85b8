"""Over HTTP and S3, under every fault: the samples, the order and the pixels of local files."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
from support.fault_server import Fault, FaultServer, SeededFaults
from support.shard_fakes import (
    FakeEncoder,
    assert_same_tensors,
    config_for,
    loading,
    micro_batches,
    write_shards,
)

from vlmpack.data.loading.loader import MicroBatch
from vlmpack.data.pipeline import TrainData
from vlmpack.recipe.data import CacheSection, StorageSection
from vlmpack.storage import RoutingFetcher
from vlmpack.storage.cache.cached import BlockUse, CachedFetcher
from vlmpack.storage.fetch import Fetcher

COUNT = 37
STEPS = 7  # an epoch of five global batches, and into the next
FAULTS = {
    "503": Fault("status", status=503),
    "429": Fault("status", status=429),
    "truncated": Fault("truncate"),
    "short": Fault("short"),
    "reset": Fault("reset"),
    "stall": Fault("stall", seconds=30),
    "slow": Fault("slow", bytes_per_second=400_000),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's folder, with one bucket."""
    root = tmp_path_factory.mktemp("root")
    write_shards(root / "bucket", COUNT, per_shard=10)
    return root


def opened(
    paths: str, index: Path, *, fetcher: Fetcher | None, shuffle: str, workers: int = 0
) -> TrainData:
    # The same name for the source, wherever it lies: the order hangs on it.
    loader = loading(workers, timeout_seconds=120)
    config = config_for(paths, index, shuffle=shuffle, **loader)
    return TrainData.open(config, FakeEncoder(), fetcher=fetcher)


@pytest.fixture(scope="module")
def local(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[MicroBatch]]:
    """What local files give, by shuffle; the shards' paths left out."""
    index = tmp_path_factory.mktemp("index")
    return {
        shuffle: placeless(
            opened(str(root / "bucket/s-*.tar"), index, fetcher=None, shuffle=shuffle)
        )
        for shuffle in ("window", "global")
    }


def placeless(data: TrainData) -> list[MicroBatch]:
    """The micro-batches, with the shards' names instead of their paths."""
    return [
        dataclasses.replace(
            micro,
            samples=tuple(
                dataclasses.replace(sample, shard=sample.shard.rpartition("/")[2])
                for sample in micro.samples
            ),
        )
        for micro in micro_batches(data, STEPS)
    ]


def storage(server: FaultServer) -> StorageSection:
    return StorageSection(
        endpoint=server.url,
        region="us-east-1",
        anonymous=True,
        allow_private=True,
        connect_timeout_seconds=5,
        read_timeout_seconds=0.2,
        max_tries=10,
    )


def address(scheme: str, server: FaultServer) -> str:
    place = "s3://bucket" if scheme == "s3" else f"{server.url}/bucket"
    return f"{place}/s-{{0000..0003}}.tar"


def run_under(
    fault: str, scheme: str, seed: int, root: Path, folder: Path, *, workers: int = 0
) -> tuple[list[MicroBatch], int]:
    """The micro-batches, and how many requests were hit.

    Half of the runs read through the cache, and half of those without it in a global order.
    """
    cached = seed % 2 == 0
    share = 0.4 if cached else 0.1  # of few requests, or of many
    seeded = SeededFaults(seed, share=share, faults=(FAULTS[fault],), attempts=2)
    with FaultServer(root, seeded=seeded) as server:
        if fault in ("503", "429"):
            server.fail(dataclasses.replace(FAULTS[fault], times=2, methods=("HEAD", "GET")))
        stores = RoutingFetcher(storage(server))
        cache = CacheSection(directory=str(folder / "cache"), max_bytes=1 << 20)
        use = BlockUse(block_bytes=1 << 15)
        data = opened(
            address(scheme, server),
            folder / "index",
            fetcher=CachedFetcher(stores, cache, use) if cached else stores,
            shuffle=shuffle_of(seed),
            workers=workers,
        )
        found = placeless(data)
        stores.close()
    deadline = time.monotonic() + 5
    while True:  # a stalled answer is written down when the server closes
        hits = sum(bool(request.fault) for request in server.requests)
        if hits or time.monotonic() > deadline:
            return found, hits
        time.sleep(0.01)


def shuffle_of(seed: int) -> str:
    return "global" if seed % 4 == 1 else "window"


@pytest.mark.cases(slow=("stall-http-1", "short-s3-1", "503-s3-0", "429-s3-1"))
@pytest.mark.parametrize(
    "seed",
    [
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2)),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 20)),
    ],
)
@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_store_gives_what_local_files_give(
    root: Path,
    tmp_path: Path,
    local: dict[str, list[MicroBatch]],
    fault: str,
    scheme: str,
    seed: int,
) -> None:
    for again in range(4):  # a seed may meet none of the few requests of a cached run
        found, hits = run_under(fault, scheme, seed + 20 * again, root, tmp_path / str(again))
        if hits:
            break
    expected = local[shuffle_of(seed)]
    assert hits > 0, "no request met the fault: the run shows nothing"
    assert len(found) == len(expected) > 15
    for one, two in zip(found, expected, strict=True):
        assert_same_tensors(one, two)


@pytest.mark.slow
def test_faults_inside_workers(
    root: Path, tmp_path: Path, local: dict[str, list[MicroBatch]]
) -> None:
    found, hits = run_under("truncated", "http", 1, root, tmp_path, workers=2)
    assert hits > 1
    for one, two in zip(found, local[shuffle_of(1)], strict=True):
        assert_same_tensors(one, two)


def test_the_orders_differ(local: dict[str, list[MicroBatch]]) -> None:
    """Guard: equality means little if every order is the same."""
    window, whole = (
        [sample.key for micro in local[name] for sample in micro.samples]
        for name in ("window", "global")
    )
    assert window != whole and sorted(window[:COUNT]) == sorted(whole[:COUNT])
