"""What the data benchmarks read: shards of at least 20 MB, on a server in a process of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import first_batch
import numpy as np
import webdataset as wds
from models import ROOT
from PIL import Image

SHARDS, SAMPLES, SAMPLE_BYTES = 10, 800, 26_000


def write_shards(folder: Path) -> int:
    """SHARDS tars of chats about one picture, and some more names of them; returns their bytes."""
    folder.mkdir(parents=True)
    pictures = [picture(seed) for seed in range(40)]
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


def picture(seed: int) -> bytes:
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
