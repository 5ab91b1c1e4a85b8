"""Rows of the matrix that no other test serves, in a short form."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from faults.deaths import EXACT
from support.checkpoints import stored_tensors
from support.fault_server import Fault, FaultServer, SeededFaults
from support.recipes import changed, copy_samples, rows, run_settings, write_recipe
from support.shards import ROOT
from support.whole_runs import audited, environment

from vlmpack import finetune
from vlmpack.api import resolve, run_recipe
from vlmpack.data.loading.ledger import SkipLimits
from vlmpack.training import reporting
from vlmpack.training.run_dir import RunDir

LIBC = ctypes.CDLL(None)

STEPS = 8


@pytest.mark.slow
def test_a_clock_that_jumps_changes_nothing(
    tmp_path: Path, monkeypatch: Any, record_property: Any
) -> None:
    """By a day back and forth, at every call; the monotonic clock cannot jump."""
    settings = run_settings(tmp_path, training__max_steps=STEPS, checkpoint__interval_steps=3)
    draw, now, jumps = random.Random(4), time.time, []

    def jumping() -> float:
        jumps.append(draw.choice((-86_400, 0, 86_400)))
        return now() + jumps[-1]

    found = []
    for clock in (now, jumping):
        monkeypatch.setattr(time, "time", clock)
        mine = changed(settings, run_dir=str(tmp_path / clock.__name__))
        run_recipe(resolve(mine, {}))
        found.append(rows(mine["run_dir"], *EXACT))
        assert audited(mine["run_dir"]).problems == []
    assert found[0] == found[1] and len(found[0]) == STEPS
    assert any(jumps) and len(jumps) > 2, "guard: nobody asked"
    record_property("injections", len(jumps))


@pytest.mark.slow
def test_a_run_is_the_same_with_another_hash_seed_and_more_threads(
    tmp_path: Path, record_property: Any
) -> None:
    """This process has a hash seed of its own, and one thread."""
    settings = run_settings(tmp_path, training__max_steps=STEPS, data__num_workers=1)
    here, there, threaded = (changed(settings, run_dir=str(tmp_path / n)) for n in "abc")
    run_recipe(resolve(here, {}))
    command = [sys.executable, "-m", "vlmpack", "finetune"]
    command.append(str(write_recipe(tmp_path / "r.json", there)))
    seed = str((int(os.environ.get("PYTHONHASHSEED", "0") or 0) + 1) % 9)
    subprocess.run(command, cwd=ROOT, env=environment() | {"PYTHONHASHSEED": seed}, check=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run_recipe(resolve(threaded, {}))
    finally:
        torch.set_num_threads(threads)
    one, other, more = (rows(each["run_dir"], *EXACT) for each in (here, there, threaded))
    assert one == other and len(one) == STEPS
    for ours, theirs in zip(more, one, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    ours, theirs = (
        stored_tensors(RunDir(Path(each["run_dir"])).checkpoints / f"step-{STEPS:08d}")
        for each in (here, there)
    )
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[key] == theirs[key]).all()) for key in ours)
    record_property("injections", 2)


class Watcher:
    """Memory and open files of this process after each step.

    Memory is looked at every tenth step, without what the allocator keeps of freed blocks: where
    other tests ran before in this process, their holes fill and empty by tens of megabytes.
    """

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.memory: list[int] = []
        self.files: list[int] = []

    def on_step(self, _: Any) -> None:
        self.files.append(self.process.num_fds())
        if len(self.files) % 10 == 0:
            gc.collect()
            LIBC.malloc_trim(0)
            self.memory.append(self.process.memory_info().rss)


def damage(path: Path, number: int) -> None:
    """Other pixels' bytes in one image of a shard that is indexed: bit rot."""
    data, status = bytearray(path.read_bytes()), path.stat()
    at = data.index(b"JFIF", number)
    data[at + 200] ^= 255
    path.write_bytes(bytes(data))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def faulty_steps(tmp_path: Path, steps: int, samples: int, bad: int) -> Watcher:
    """A run from a store that fails one request in a hundred of each kind, with bad samples, and a
    death by SIGTERM's flag in its middle; the ledger is compared with the plan."""
    place = tmp_path / "root" / "data"
    place.mkdir(parents=True)
    each = samples // 2
    for number in range(2):
        source = ROOT / f"assets/digits/train-00000{number}.tar"
        copy_samples(source, place / f"s-{number}.tar", each)
    kinds = ("status", "truncate", "reset", "short", "latency")
    faults = tuple(Fault(kind, seconds=0.05) for kind in kinds)
    seeded = SeededFaults(7, 0.01 * len(faults), faults, attempts=2)
    watcher = Watcher()
    with FaultServer(tmp_path / "root", seeded=seeded) as server:
        settings = changed(
            run_settings(tmp_path),
            data__train=[{"path": "s3://data/s-{0..1}.tar", "name": "digits"}],
            data__storage={
                "endpoint": server.url,
                "region": "us-east-1",
                "anonymous": True,
                "allow_private": True,
            },
            data__cache={"max_bytes": 0},
            training__max_steps=steps,
            training__micro_batch_size=4,
            training__global_batch_size=8,
            checkpoint__interval_steps=10,
            checkpoint__asynchronous=True,
            checkpoint__keep=2,
        )
        run_recipe(resolve(changed(settings, training__max_steps=1), {}))  # it is indexed
        for number in range(bad):
            damage(place / f"s-{number % 2}.tar", 40_000 * (number // 2 + 1))
        finetune(settings, callbacks=[watcher])
        audit = audited(settings["run_dir"])
        met = {request.fault for request in server.requests} - {""}
        assert met and len(watcher.files) == steps - 1
    assert audit.problems == []
    for epoch in audit.epochs:
        assert epoch.trained + epoch.skipped + epoch.pending == epoch.planned == samples
    whole = [epoch for epoch in audit.epochs if not epoch.pending]
    assert {epoch.skipped for epoch in whole[1:]} == {bad}, "guard: no bad sample was met"
    return watcher


@pytest.mark.parametrize(
    ("steps", "samples", "bad"),
    [
        pytest.param(150, 200, 1, marks=pytest.mark.slow, id="150"),
        pytest.param(2_000, 400, 4, marks=pytest.mark.soak, id="2000"),
    ],
)
def test_one_percent_of_each_fault_leaves_a_balanced_ledger(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Any,
    steps: int,
    samples: int,
    bad: int,
) -> None:
    # A run whose samples are bad by one in a hundred would end after its tenth.
    monkeypatch.setattr(reporting, "SkipLimits", lambda: SkipLimits(max_fraction=0.02))
    watcher = faulty_steps(tmp_path, steps, samples, bad)
    files, memory = watcher.files[steps // 3 :], watcher.memory[steps // 30 :]
    half = len(memory) // 2
    assert max(files) - min(files) <= 8
    assert min(memory[half:]) - min(memory[:half]) < 6 << 20, memory
    record_property("injections", steps)
