"""Reading WebDataset shards over loopback HTTP: ours against webdataset, and what a start costs.

Shards of at least 20 MB with samples of 26 KB lie on a server in a process of its own. Every rate
is one process's, members of samples without decoding, from an empty cache in each round; bytes are
the server's count.

- raw: samples in the order of a window shuffle, read from the index by byte range, through blocks
  that are fetched a window ahead; every sample's checksum is verified.
- webdataset: `pipe:curl`, in the order of the tars.
- first epoch: every shard is indexed and every sample read, as a run begins on unindexed data.
- starts: a process each, from its launch to the first batch of 8 samples, on 100 shards.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.request import urlopen

import first_batch
import numpy as np
import webdataset as wds
from first_batch import fetcher_for, open_data
from models import ROOT
from PIL import Image
from timing import medians

from vlmpack.data.cache.cached import CachedFetcher
from vlmpack.data.index.table import SampleRef
from vlmpack.data.loading.read import SampleReader
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.packers import MIN_WINDOW_SAMPLES
from vlmpack.data.plan.state import DataState

SHARDS, SAMPLES, SAMPLE_BYTES = 10, 800, 26_000


def bench_data(rounds: int) -> dict[str, object]:
    """All figures of one run; None where curl is not installed."""
    with tempfile.TemporaryDirectory(prefix="vlmpack-bench-") as name:
        root = Path(name) / "root"
        size = write_shards(root / "bucket")
        reads = _bench_reads(root, Path(name), rounds)
        with serve(root) as server:
            epoch = _bench_first_epoch(server, Path(name), size)
            resume = _bench_resume(server, Path(name), rounds)
            starts = _bench_starts(server, Path(name), min(rounds, 5))
        return {"shard_megabytes": size / SHARDS / 1e6, **reads, **epoch, **resume, **starts}


def write_shards(folder: Path) -> int:
    """SHARDS tars of chats about one picture, and some more names of them; returns their bytes."""
    folder.mkdir(parents=True)
    pictures = [_picture(seed) for seed in range(40)]
    number = 0
    for shard in range(SHARDS):
        path = folder / f"train-{shard:06d}.tar"
        with wds.TarWriter(str(path)) as writer:
            for _ in range(SAMPLES):
                fields = {"json": _chat(number), "jpg": pictures[number % len(pictures)]}
                writer.write({"__key__": f"{number:08d}", **fields})
                number += 1
    for copy in range(first_batch.MANY):
        os.link(folder / f"train-{copy % SHARDS:06d}.tar", folder / first_batch.name_of(copy))
    return sum(path.stat().st_size for path in folder.glob("train-*.tar"))


def _picture(seed: int) -> bytes:
    """A JPEG of SAMPLE_BYTES: smooth colours with noise, filled up behind its end."""
    draw = np.random.default_rng(seed)
    small = Image.fromarray(draw.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    smooth = np.asarray(small.resize((400, 300), Image.Resampling.BICUBIC), dtype=np.float64)
    noisy = np.clip(smooth + draw.normal(0, 9, smooth.shape), 0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noisy).save(stream, "JPEG", quality=70)
    assert 20_000 < stream.tell() < SAMPLE_BYTES
    return stream.getvalue().ljust(SAMPLE_BYTES, b"\0")


def _chat(number: int) -> bytes:
    question = [{"type": "image"}, {"type": "text", "text": f"What is on picture {number}?"}]
    answer = f"It is picture {number}."
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    return json.dumps({"messages": messages}).encode()


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str

    def stats(self) -> dict[str, int]:
        """Requests and body bytes so far."""
        with urlopen(f"{self.url}/.stats") as answer:
            found: dict[str, int] = json.load(answer)
        return found

    def shards(self) -> list[str]:
        """Their addresses."""
        return [f"{self.url}/bucket/train-{number:06d}.tar" for number in range(SHARDS)]


@contextlib.contextmanager
def serve(root: Path, latency_ms: float = 0.0) -> Iterator[Server]:
    """The tests' server in its own process."""
    command = [sys.executable, "-m", "support.fault_server", str(root)]
    process = subprocess.Popen(
        [*command, "--latency-ms", str(latency_ms)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield Server(process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait()


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


def _bench_reads(root: Path, work: Path, rounds: int) -> dict[str, object]:
    if shutil.which("curl") is None:
        return {"against_webdataset": "curl is not installed"}
    with serve(root) as near, serve(root, latency_ms=40.0) as far:
        refs, variants = {}, {}
        for name, server in (("near", near), ("far", far)):
            urls = server.shards()
            data, _ = open_data(urls, work / f"index-{name}", None)
            refs[name] = _epoch(data)
            variants[f"webdataset_{name}"] = lambda urls=urls: _read_webdataset(urls)
            variants[f"ours_{name}"] = lambda name=name: _read(refs[name], work / "cache")
        seconds = medians(variants, rounds=rounds, warm_up=1)
        cpu = {name: _cpu_seconds(variants[f"{name}_near"]) for name in ("webdataset", "ours")}
    count = SHARDS * SAMPLES
    return {
        "raw_speedup_over_webdataset": seconds["webdataset_near"] / seconds["ours_near"],
        "raw_speedup_over_webdataset_at_40_ms": seconds["webdataset_far"] / seconds["ours_far"],
        "raw_rate_at_40_ms_of_own": seconds["ours_near"] / seconds["ours_far"],
        "webdataset_cpu_seconds_over_raw": cpu["webdataset"] / cpu["ours"],
        "raw_samples_per_second": count / seconds["ours_near"],
        "webdataset_samples_per_second": count / seconds["webdataset_near"],
    }


def _cpu_seconds(run: Callable[[], None]) -> float:
    """Of this process and those it waited for, curl among them; median of three."""

    def once() -> float:
        before = os.times()
        run()
        return sum(os.times()[:4]) - sum(before[:4])

    return statistics.median(once() for _ in range(3))


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
    seconds: dict[str, list[float]] = {"ours": [], "webdataset": []}
    for number in range(rounds):
        for kind, values in seconds.items():
            folder = work / f"start-{number}"
            command = [sys.executable, first_batch.__file__, kind, str(folder), server.url]
            started = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            line = process.stdout.readline()
            values.append(time.perf_counter() - started)
            process.kill()
            process.wait()
            assert line == f"{first_batch.BATCH}\n", line
            shutil.rmtree(folder, ignore_errors=True)
    ours, theirs = (statistics.median(values) for values in seconds.values())
    return {
        "launch_to_first_batch_over_webdataset": ours / theirs,
        "launch_to_first_batch_seconds": ours,
    }
