"""A loader process that dies is noticed within seconds, whatever it did; none stays behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.shard_fakes import FakeEncoder, loading, micro_batches, open_data, write_shards
from support.shards import ROOT

from vlmpack.data.loading import workers
from vlmpack.encode.sample import VLMSample
from vlmpack.errors import DataError
from vlmpack.packing.batch import EncodedSample

NEVER = 600
"""The timeout of these runs: what ends them sooner is not the timeout."""


class HalfSender(FakeEncoder):
    """In a worker: takes the lock of the results' pipe, sends half a message, and dies."""

    def encode(
        self, sample: VLMSample, sizes: Sequence[tuple[int, int]] | None = None
    ) -> EncodedSample:
        frame: Any = sys._getframe()
        while "data_queue" not in frame.f_locals:
            frame = frame.f_back
        results = frame.f_locals["data_queue"]
        results._wlock.acquire()
        os.write(results._writer.fileno(), struct.pack("!i", 5000) + b"half of a message")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")


def seconds_until_refused(folder: Path, encoder: FakeEncoder, reason: str) -> float:
    pattern = write_shards(folder, 37, per_shard=10)
    settings = loading(2, timeout_seconds=NEVER)
    open_data(pattern, folder / "i", encoder=encoder, num_probed=0)  # starts and indexes
    data = open_data(pattern, folder / "i", encoder=encoder, num_probed=0, **settings)
    begin = time.monotonic()
    with pytest.raises(DataError, match=reason) as caught:
        micro_batches(data, 5)
    assert caught.value.error_class == "transport"
    assert "data.num_workers or data.prefetch_batches" in str(caught.value)
    return time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "at_least"),
    [(FakeEncoder(die=frozenset({"q3 "})), 0.0), (HalfSender(), 1.0)],
    ids=["while it works", "in the middle of a message"],
)
def test_a_killed_worker_is_noticed_in_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoder: FakeEncoder, at_least: float
) -> None:
    monkeypatch.setattr(workers, "STUCK_SECONDS", 1.0)
    reason = r"ended: worker [01] \(process \d+\) was ended by SIGKILL\. .*memory ran out"
    seconds = seconds_until_refused(tmp_path, encoder, reason)
    assert at_least < seconds < 25
    assert not [child for child in multiprocessing.active_children() if child.is_alive()]
    assert not [t for t in threading.enumerate() if t.name == "vlmpack-workers"]


@pytest.mark.slow
def test_a_worker_that_is_killed_from_outside_while_the_trainer_computes(tmp_path: Path) -> None:
    """What it had sent is still used; the next batch that was its task ends the run."""
    pattern = write_shards(tmp_path, 37, per_shard=10)
    settings = loading(2, prefetch_batches=1, timeout_seconds=NEVER)
    data = open_data(pattern, tmp_path / "i", num_probed=0, **settings)
    steps = data.batches(data.start(), rank=0, dp=1, max_steps=100)
    next(steps)
    victim = multiprocessing.active_children()[0]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(DataError, match=rf"process {victim.pid}\) was ended by SIGKILL"):
        for _ in steps:
            pass
    assert time.monotonic() - begin < 15


@pytest.mark.slow
def test_no_process_and_no_thread_stays(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, 37, per_shard=10)
    settings = loading(2, timeout_seconds=NEVER)
    data = open_data(pattern, tmp_path / "i", num_probed=0, **settings)
    assert len(micro_batches(data, 5)) > 5
    steps = data.batches(data.start(), rank=0, dp=1, max_steps=100)
    next(steps)
    assert len(multiprocessing.active_children()) == 2
    assert [t for t in threading.enumerate() if t.name == "vlmpack-workers"]
    begin = time.monotonic()
    steps.close()  # type: ignore[attr-defined]  # a generator: the run ends in the middle
    assert time.monotonic() - begin < 15
    assert not multiprocessing.active_children()
    assert not [t for t in threading.enumerate() if t.name == "vlmpack-workers"]


FAILING = """
import sys
from pathlib import Path
from support.shard_fakes import loading, open_data


def main():
    loader = loading(1, timeout_seconds=600)
    folder = Path(sys.argv[1])
    data = open_data(str(folder / "s-*.tar"), folder / "i", num_probed=0, **loader)
    steps = data.batches(data.start(), rank=0, dp=1, max_steps=100)
    next(steps)
    raise RuntimeError("another process was lost")

if __name__ == "__main__":
    main()
"""


@pytest.mark.soak
def test_a_run_that_ends_by_an_error_ends(tmp_path: Path) -> None:
    """Its workers block SIGTERM, so Python's own way to end them at exit would wait for ever."""
    write_shards(tmp_path, 37, per_shard=10)
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    search = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "another process was lost" in done.stderr
