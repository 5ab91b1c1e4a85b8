"""Reading WebDataset shards over loopback HTTP: ours against its peers, and what a start costs.

Shards of at least 20 MB with samples of 26 KB lie on a server in a process of its own. Every rate
is one process's, members of samples without decoding, from an empty cache in each round; bytes are
the server's count. The variants of a comparison alternate, medians are compared; CPU seconds are
the reading process's and its children's, curl among them, without the server's.

- raw: samples in the order of a window shuffle, read from the index by byte range, through blocks
  that are fetched a window ahead; every sample's checksum is verified.
- webdataset: `pipe:curl`, in the order of the tars.
- Energon: see bench_energon.
- first epoch: every shard is indexed and every sample read, as a run begins on unindexed data.
- starts: a process each, from its launch to the first batch of 8 samples, on 100 shards.
- digits: see bench_feed.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import bench_energon
import first_batch
import webdataset as wds
from bench_feed import bench_feed
from first_batch import fetcher_for, open_data
from loopback import SAMPLE_BYTES, SAMPLES, SHARDS, Server, serve, write_shards
from timing import medians

from vlmpack.data.index.table import SampleRef
from vlmpack.data.loading.read import SampleReader
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.packers import MIN_WINDOW_SAMPLES
from vlmpack.data.plan.state import DataState
from vlmpack.storage.cache.cached import CachedFetcher

LATENCY_MS = 40.0


def bench_data(rounds: int) -> dict[str, object]:
    """All figures of one run; None where curl is not installed."""
    with tempfile.TemporaryDirectory(prefix="vlmpack-bench-") as name:
        root, work = Path(name) / "root", Path(name)
        size = write_shards(root / "bucket")
        reads = _bench_reads(root, work, rounds)
        with serve(root) as server:
            epoch = _bench_first_epoch(server, work, size)
            resume = _bench_resume(server, work, rounds)
            starts = _bench_starts(server, work, rounds)
        feed = bench_feed(work / "feed", min(rounds, 3), LATENCY_MS)
        shard = {"shard_megabytes": size / SHARDS / 1e6}
        return {**shard, **reads, **epoch, **resume, **starts, **feed}


def _epoch(data: TrainData) -> list[SampleRef]:
    """The samples of the first epoch in their order."""
    planned = itertools.takewhile(
        lambda batch: batch.position.epoch == 0, data.planned(data.start(), None)
    )
    return [
        ref for batch in planned for samples in batch.bins for ref in data.request(samples).samples
    ]


def _read(refs: Sequence[SampleRef], cache: Path) -> None:
    """All samples from an empty cache; as in a run, a window's shards are fetched before it."""
    shutil.rmtree(cache, ignore_errors=True)
    fetcher = fetcher_for(cache)
    assert isinstance(fetcher, CachedFetcher)
    reader = SampleReader(fetcher)
    step = MIN_WINDOW_SAMPLES
    windows = [refs[at : at + step] for at in range(0, len(refs), step)]
    for number, window in enumerate(windows):
        near = windows[number : number + 2]
        fetcher.prefetch(list(dict.fromkeys(ref.stamp for some in near for ref in some)))
        for ref in window:
            assert len(reader.read_raw(ref).members) == 2


def _read_webdataset(urls: Sequence[str]) -> None:
    commands = [f"pipe:curl -s -f {url}" for url in urls]
    count = sum(
        len(sample["jpg"]) == SAMPLE_BYTES
        for sample in wds.WebDataset(commands, shardshuffle=False)
    )
    assert count == SHARDS * SAMPLES, count


@dataclass(frozen=True)
class Cost:
    """What one variant took: medians of wall and CPU seconds."""

    wall: float
    cpu: float


def _costs(
    variants: Mapping[str, Callable[[], Cost | None]], *, rounds: int, warm_up: int = 1
) -> dict[str, Cost]:
    """Every round runs each variant once, in turn; one may say by itself what it took."""
    taken: dict[str, list[Cost]] = {name: [] for name in variants}
    for number in range(warm_up + rounds):
        for name, run in variants.items():
            before, started = _cpu_seconds(), time.perf_counter()
            told = run()
            seconds = time.perf_counter() - started
            cost = Cost(seconds, _cpu_seconds() - before) if told is None else told
            if number >= warm_up:
                taken[name].append(cost)
    return {
        name: Cost(
            statistics.median(cost.wall for cost in costs),
            statistics.median(cost.cpu for cost in costs),
        )
        for name, costs in taken.items()
    }


def _cpu_seconds() -> float:
    """Of this process and the children that it waited for."""
    return sum(os.times()[:4])


def _bench_reads(root: Path, work: Path, rounds: int) -> dict[str, object]:
    if shutil.which("curl") is None:
        return {"against_webdataset": "curl is not installed"}
    variants: dict[str, Callable[[], Cost | None]] = {}
    with (
        serve(root) as near,
        serve(root, latency_ms=LATENCY_MS) as far,
        bench_energon.readers(root, work, near) as energon,
    ):
        for name, server in (("near", near), ("far", far)):
            urls = server.shards()
            data, _ = open_data(urls, work / f"index-{name}", None)
            refs = _epoch(data)
            data.split.close()
            variants[f"webdataset_{name}"] = lambda urls=urls: _read_webdataset(urls)
            variants[f"ours_{name}"] = lambda refs=refs: _read(refs, work / "cache")
        for name, read in energon.items():
            variants[name] = lambda read=read: Cost(*read())
        costs = _costs(variants, rounds=rounds)
    ours, theirs = costs["ours_near"], costs["webdataset_near"]
    count = SHARDS * SAMPLES
    return {
        "raw_speedup_over_webdataset": theirs.wall / ours.wall,
        "raw_speedup_over_webdataset_by_cpu": theirs.cpu / ours.cpu,
        "raw_speedup_over_webdataset_at_40_ms": costs["webdataset_far"].wall
        / costs["ours_far"].wall,
        "raw_rate_at_40_ms_of_own": ours.wall / costs["ours_far"].wall,
        "raw_samples_per_second": count / ours.wall,
        "webdataset_samples_per_second": count / theirs.wall,
        **_against_energon(ours, costs),
    }


def _against_energon(ours: Cost, costs: Mapping[str, Cost]) -> dict[str, object]:
    if "energon_s3" not in costs:
        return {"against_energon": f"not installed; {bench_energon.PYTHON} names its Python"}
    figures: dict[str, object] = {}
    for name in ("energon_s3", "energon_local"):
        figures[f"raw_speedup_over_{name}"] = costs[name].wall / ours.wall
        figures[f"raw_speedup_over_{name}_by_cpu"] = costs[name].cpu / ours.cpu
        figures[f"{name}_samples_per_second"] = SHARDS * SAMPLES / costs[name].wall
    return figures


def _bench_first_epoch(server: Server, work: Path, size: int) -> dict[str, object]:
    before = server.stats()["bytes"]
    data, fetcher = open_data(server.shards(), work / "index-epoch", work / "cache-epoch")
    reader = SampleReader(fetcher)
    for batch in data.planned(data.start(), None):
        if batch.position.epoch:
            break
        for samples in batch.bins:
            found = reader.read_all(data.request(samples).samples)
            assert not any(isinstance(sample, Exception) for sample in found)
    data.split.close()
    return {"first_epoch_bytes_of_data": (server.stats()["bytes"] - before) / size}


def _bench_resume(server: Server, work: Path, rounds: int) -> dict[str, object]:
    """From opening to the first batch, with the index and the cache of the epoch before."""
    urls = server.shards()
    folders = (work / "index-epoch", work / "cache-epoch")
    data, _ = open_data(urls, *folders, global_batch_size=64)
    length = data.steps_per_epoch()
    states = {
        place: _state_after(data, int(length * share))
        for place, share in (("fresh", 0.0), ("early", 0.1), ("middle", 0.5), ("late", 0.9))
    }
    data.split.close()

    def start(state: DataState) -> None:
        resume = state if state.batches else None
        data, _ = open_data(urls, *folders, global_batch_size=64, resume=resume)
        next(iter(data.batches(state, rank=0, dp=1, max_steps=None)))
        data.split.close()

    seconds = medians(
        {place: lambda state=state: start(state) for place, state in states.items()},
        rounds=rounds,
        warm_up=1,
    )
    fresh = seconds.pop("fresh")
    return {
        **{f"resume_{place}_over_fresh": value / fresh for place, value in seconds.items()},
        "fresh_start_seconds": fresh,
        "state_bytes": max(len(json.dumps(state.to_json())) for state in states.values()),
    }


def _state_after(data: TrainData, steps: int) -> DataState:
    """The state of a run after some steps, from the plan alone."""
    state = data.start()
    for batch in itertools.islice(data.planned(state, None), steps):
        following = batch.following
        state = replace(
            state,
            epoch=following.epoch,
            window=following.window,
            batch=following.batch,
            batches=state.batches + 1,
            cursors=batch.cursors,
        )
    return state


def _bench_starts(server: Server, work: Path, rounds: int) -> dict[str, object]:
    kinds = ("ours", "webdataset")
    costs = _costs(
        {kind: lambda kind=kind: _start(kind, work / "start", server.url) for kind in kinds},
        rounds=rounds,
        warm_up=0,
    )
    ours, theirs = costs["ours"], costs["webdataset"]
    return {
        "launch_to_first_batch_over_webdataset": ours.wall / theirs.wall,
        "launch_to_first_batch_over_webdataset_by_cpu": ours.cpu / theirs.cpu,
        "launch_to_first_batch_seconds": ours.wall,
        "webdataset_launch_to_first_batch_seconds": theirs.wall,
    }


def _start(kind: str, folder: Path, url: str) -> Cost:
    """Launches a process and waits for its first batch; CPU seconds are its own."""
    command = [sys.executable, first_batch.__file__, kind, str(folder), url]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    wall = time.perf_counter() - started
    process.kill()
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)
    count, _, cpu = line.partition(" ")
    assert count == str(first_batch.BATCH), line
    return Cost(wall, float(cpu))
