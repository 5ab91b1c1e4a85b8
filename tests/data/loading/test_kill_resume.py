"""kill -9 at random moments, resumed with other ranks and workers: the record of bins is unbroken.

Small data-parallel groups (gloo) run the data layer alone: each step, the ranks' bins are gathered,
rank 0 writes the step's bins down, then saves the state. The reference is one process that is left
alone.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
import zlib
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.shard_fakes import key_of, loading, open_data, write_shards

from vlmpack.data.forkserver import DEFAULT_PRELOAD, worker_context
from vlmpack.data.loading.loader import MicroBatch
from vlmpack.data.plan import packers
from vlmpack.data.plan.state import DataState

COUNT = 37  # an epoch of five global batches
WINDOW = 16
STEP_SECONDS = 0.01
STEPS_PER_KILL = 14
SHAPES = ((1, 0), (1, 2), (2, 0), (2, 1), (4, 0))
"""(data-parallel ranks, workers of each)."""
PRELOAD = (*DEFAULT_PRELOAD, "shard_fakes")
Bin = list[tuple[str, int]]


def bin_of(micro: MicroBatch) -> Bin:
    """(key, checksum of ids and pixels) of each sample; the checksum is the whole bin's."""
    data = micro.batch.input_ids.numpy().tobytes()
    if micro.batch.media is not None:
        data += micro.batch.media.pixel_values.numpy().tobytes()
    return [(sample.key, zlib.crc32(data)) for sample in micro.samples]


def record_of(run: Path) -> list[list[Bin]]:
    """The bins of every step, in order; a step that was repeated after a kill counts once."""
    steps: dict[int, list[Bin]] = {}
    path = run / "record.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            step, bins = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut by a kill
        steps[step] = bins
    assert list(steps) == list(range(len(steps)))
    return list(steps.values())


def in_one_order(record: list[list[Bin]]) -> list[list[Bin]]:
    """Bins are dealt to ranks by their cost, so their order in a step follows the ranks."""
    return [sorted(bins) for bins in record]


def saved_state(run: Path) -> DataState | None:
    path = run / "state.json"
    return DataState.from_json(json.loads(path.read_text())) if path.exists() else None


def train(
    rank: int, world: int, workers: int, folder: Path, run: Path, steps: int, shuffle: str
) -> None:
    """One rank of one launch."""
    packers.MIN_WINDOW_SAMPLES = WINDOW
    group = run / f"group-{os.environ['LAUNCH']}"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{group}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    loader = loading(workers, prefetch_batches=2, timeout_seconds=60)
    pattern, saved = str(folder / "s-*.tar"), saved_state(run)
    data = open_data(pattern, run / "index", **loader, shuffle=shuffle, resume=saved)
    state = saved or data.start()
    for step in data.batches(state, rank=rank, dp=world, max_steps=steps):
        shares: list[list[Bin]] = [[]] * world
        dist.all_gather_object(shares, [bin_of(micro) for micro in step.micro_batches])
        bins = [bin for group in zip(*shares, strict=True) for bin in group if bin]
        if rank == 0:
            with (run / "record.jsonl").open("a") as record:
                record.write(f"\n{json.dumps([step.batch, bins])}\n")
            temporary = run / "state.tmp"
            temporary.write_text(json.dumps(step.state.to_json()))
            temporary.replace(run / "state.json")
        time.sleep(STEP_SECONDS)
    dist.destroy_process_group()


def launch(number: int, world: int, *arguments: object) -> list[Any]:
    processes = []
    for rank in range(world):
        process = worker_context(PRELOAD).Process(  # type: ignore[attr-defined]
            target=_train_in_launch, args=(number, rank, world, *arguments)
        )
        process.start()
        processes.append(process)
    return processes


def _train_in_launch(number: int, *arguments: Any) -> None:
    os.environ["LAUNCH"] = str(number)
    train(*arguments)


def kill(processes: list[Any]) -> bool:
    """Kills all, one a little before the others; returns whether they were at work."""
    before = [process.exitcode for process in processes]
    assert all(code in (None, 0) for code in before), f"a rank failed: {before}"
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.002)
    for process in processes:
        process.join()
    return None in before


def run_with_kills(
    folder: Path, run: Path, kills: int, *, seed: int, shuffle: str
) -> list[list[Bin]]:
    """Launches and kills, then a launch that is left alone."""
    draw = random.Random(seed)
    steps = STEPS_PER_KILL * kills + 10
    shapes, killed = set(), 0
    for number in range(kills):
        world, workers = draw.choice(SHAPES)
        shapes.add((world, workers))
        done = len(record_of(run))
        processes = launch(number, world, workers, folder, run, steps, shuffle)
        if draw.random() < 0.8:  # else perhaps while it starts
            deadline = time.monotonic() + 60
            while len(record_of(run)) <= done and time.monotonic() < deadline:
                time.sleep(0.005)
            assert len(record_of(run)) > done, "no step within a minute"
        time.sleep(draw.random() * 0.1)
        killed += kill(processes)
    assert killed > 0.7 * kills, "most runs were finished before they were to be killed"
    assert len(shapes) > min(kills, 3) // 2, "guard: several sizes were met"
    for process in launch(kills, 2, 0, folder, run, steps, shuffle):
        process.join()
        assert process.exitcode == 0
    return record_of(run)


@pytest.mark.cases(slow="2-window")
@pytest.mark.parametrize(
    ("kills", "shuffle"),
    [
        pytest.param(3, "global", marks=pytest.mark.slow),
        pytest.param(2, "window", marks=pytest.mark.slow),
        pytest.param(50, "global", marks=pytest.mark.soak),
        pytest.param(20, "window", marks=pytest.mark.soak),
    ],
)
def test_killed_runs_have_the_record_of_an_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int, shuffle: str
) -> None:
    monkeypatch.setattr(packers, "MIN_WINDOW_SAMPLES", WINDOW)
    write_shards(tmp_path, COUNT, per_shard=10)
    run = tmp_path / "run"
    run.mkdir()
    record = run_with_kills(tmp_path, run, kills, seed=3, shuffle=shuffle)
    data = open_data(str(tmp_path / "s-*.tar"), tmp_path / "reference", shuffle=shuffle)
    assert data.identity["data.shuffle"] == shuffle and data.plan.window == WINDOW
    unbroken = [
        json.loads(json.dumps([bin_of(micro) for micro in step.micro_batches if micro.samples]))
        for step in data.batches(data.start(), rank=0, dp=1, max_steps=len(record))
    ]
    assert len(record) == STEPS_PER_KILL * kills + 10
    assert in_one_order(record) == in_one_order(unbroken)
    for first in range(0, len(record) - 4, 5):
        seen = Counter(key for bins in record[first : first + 5] for bin in bins for key, _ in bin)
        assert seen == Counter(key_of(number) for number in range(COUNT)), "an epoch"
    assert in_one_order(record[:5]) != in_one_order(record[5:10])


def load_for_ever(folder: Path, pids: Path) -> None:
    loader = loading(2, timeout_seconds=60)
    data = open_data(str(folder / "s-*.tar"), folder / "index", **loader)
    for step in data.batches(data.start(), rank=0, dp=1, max_steps=10**9):
        if step.batch == 1:
            pids.write_text(" ".join(str(child.pid) for child in multiprocessing.active_children()))
        time.sleep(STEP_SECONDS)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.soak
def test_workers_end_with_a_killed_trainer(tmp_path: Path) -> None:
    write_shards(tmp_path, COUNT, per_shard=10)
    trainer = worker_context(PRELOAD).Process(  # type: ignore[attr-defined]
        target=load_for_ever, args=(tmp_path, tmp_path / "pids")
    )
    trainer.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    workers = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(workers) == 2 and all(is_running(pid) for pid in workers)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.join()
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < deadline, "workers of a killed run stay for ever"
        time.sleep(0.1)
