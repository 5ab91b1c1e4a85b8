"""kill -9 of real runs of several processes, resumed with other ones: what was trained is unbroken.

Each launch is killed at a random moment, while it starts, trains or saves; some through torchrun,
where one process is killed and the launcher ends the others. The next one goes on with another
number of processes and of loader workers. Audited after every kill, and compared at the end.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import stored_tensors
from support.recipes import changed, copy_samples, rows, write_recipe
from support.record_data import write_records
from support.shards import ROOT

from vlmpack.api import resolve, run_recipe
from vlmpack.build.look import open_train
from vlmpack.proof.audit import audit_run
from vlmpack.training.record import SampleName, read_launches, standing_batches
from vlmpack.training.run_dir import RunDir

STEPS_PER_KILL = 6
WAIT_SECONDS = 120
SHAPES = ((1, 0), (1, 2), (2, 0), (2, 1), (4, 0), (4, 1))
"""(processes, loader workers of each)."""


@dataclass(frozen=True)
class Kill:
    """One launch that is killed.

    Args:
        processes: data-parallel.
        workers: of each process.
        launcher: torchrun starts it, and one process alone is killed.
        asynchronous: checkpoints are written in the background.
        starting: it is killed at a random moment of its start, not while it trains.
        saved: it is killed after a checkpoint of its own at the earliest.
    """

    processes: int
    workers: int
    launcher: bool = False
    asynchronous: bool = False
    starting: bool = False
    saved: bool = True


def drawn(count: int, seed: int) -> list[Kill]:
    """Kills by lot; the first is of a run of two processes."""
    draw = random.Random(seed)
    shapes = [(2, 1), *(draw.choice(SHAPES) for _ in range(count - 1))]
    return [
        Kill(
            *shape,
            launcher=shape[0] > 1 and draw.random() < 0.4,
            asynchronous=draw.random() < 0.5,
            starting=draw.random() < 0.2,
            saved=draw.random() < 0.7,
        )
        for shape in shapes
    ]


def command(recipe: Path, kill: Kill) -> list[str]:
    overrides = (
        f"data.num_workers={kill.workers}",
        f"checkpoint.asynchronous={str(kill.asynchronous).lower()}",
    )
    return ["-m", "vlmpack", "finetune", str(recipe), *overrides]


def start(recipe: Path, kill: Kill, log: Path) -> list[subprocess.Popen[bytes]]:
    """The launcher, or each rank by itself with the variables that a launcher sets."""
    count = kill.processes
    shared = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    head = [sys.executable]
    ranks: list[dict[str, str]] = [{}]
    if kill.launcher:
        head += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    elif count > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    with log.open("ab") as output:
        return [
            subprocess.Popen(
                [*head, *command(recipe, kill)],
                cwd=ROOT,
                env=os.environ | shared | rank,
                stdout=output,
                stderr=output,
            )
            for rank in ranks
        ]


def children_of(parent: int) -> list[int]:
    """Processes that it started and that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(path.parent.name))
    return sorted(found)


def kill_all(processes: list[subprocess.Popen[bytes]], kill: Kill, draw: random.Random) -> None:
    """One rank of a launcher's, which then ends the others; or all, one just before the next."""
    if kill.launcher:
        if ranks := children_of(processes[0].pid):
            os.kill(draw.choice(ranks), 9)
        else:
            processes[0].terminate()
        processes[0].wait(WAIT_SECONDS)
        return
    for process in draw.sample(processes, len(processes)):
        process.kill()
        time.sleep(draw.random() * 0.01)
    for process in processes:
        process.wait()


def recorded(run_dir: RunDir) -> list[tuple[int, int, list[tuple[SampleName, ...]]]]:
    """(batch, epoch, bins) of every batch that all replicas recorded; in which order they share
    the bins out is another matter."""
    return [
        (
            record.batch,
            next(iter(record.steps.values())).epoch,
            sorted(bin_ for step in record.steps.values() for bin_ in step.bins if bin_),
        )
        for record in standing_batches(run_dir.samples, read_launches(run_dir.samples))
        if not record.missing_ranks
    ]


def steps_of_launch(run_dir: RunDir, number: int) -> int:
    """What replica 0 wrote down in one launch."""
    path = run_dir.samples / "rank-0000.jsonl"
    return path.read_text().count(f'{{"launch":{number},') if path.exists() else 0


def checkpoints(run_dir: RunDir) -> set[str]:
    """The finished ones."""
    return {path.parent.name for path in run_dir.checkpoints.glob("step-*/COMPLETE")}


def wait_and_kill(
    recipe: Path, run_dir: RunDir, kill: Kill, log: Path, draw: random.Random
) -> bool:
    """A launch that is killed; whether it was at work."""
    number = max((launch.number for launch in read_launches(run_dir.samples)), default=0) + 1
    wanted, saved = draw.randint(1, STEPS_PER_KILL - 1), checkpoints(run_dir)
    processes = start(recipe, kill, log)
    try:
        if kill.starting:
            time.sleep(draw.random() * 5)
        else:
            deadline = time.monotonic() + WAIT_SECONDS
            while steps_of_launch(run_dir, number) < wanted or (
                kill.saved and checkpoints(run_dir) <= saved
            ):
                assert time.monotonic() < deadline, f"no step: {log.read_text()[-3000:]}"
                assert processes[0].poll() is None, log.read_text()[-3000:]
                time.sleep(0.01)
            time.sleep(draw.random() * 0.3)
        running = all(process.poll() is None for process in processes)
    finally:
        kill_all(processes, kill, draw)
    return running


def audited(run_dir: RunDir) -> Any:
    found = audit_run(run_dir, open_train(run_dir.path)[0])
    assert found.problems == []
    return found


TWO = Kill(2, 1, launcher=True, asynchronous=True)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kills", "last"),
    [
        pytest.param([TWO], 1, id="1"),
        pytest.param([TWO, Kill(1, 0)], 4, id="2"),
        pytest.param(drawn(50, seed=11), 4, id="50"),
    ],
)
def test_killed_runs_train_what_an_unbroken_one_trains(
    settings: dict[str, Any], tmp_path: Path, kills: list[Kill], last: int
) -> None:
    """The launch after the last kill has `last` processes and is left alone.

    At the other tests' rate a long run learns its 42 samples by heart: then two unbroken runs of 1
    and 4 processes, which sum gradients in another order, are 6% apart; at this one 2e-6.
    """
    for number in range(2):
        source = ROOT / f"assets/digits/train-00000{number}.tar"
        copy_samples(source, tmp_path / f"shard-{number}.tar", 21)
    steps = STEPS_PER_KILL * len(kills) + 8
    values = changed(
        settings,
        data__train=str(tmp_path / "shard-{0..1}.tar"),
        training__global_batch_size=8,
        training__micro_batch_size=2,
        training__max_steps=steps,
        checkpoint__interval_steps=2,
        checkpoint__keep=2,
        optim__schedule="constant",
        optim__lr=2e-5,
    )
    unbroken = changed(values, run_dir=str(tmp_path / "unbroken"))
    run_recipe(resolve(unbroken, {}))
    expected = RunDir(Path(unbroken["run_dir"]))
    recipe = write_recipe(tmp_path / "recipe.json", values)
    run_dir, log = RunDir(Path(values["run_dir"])), tmp_path / "log"
    draw, at_work = random.Random(len(kills)), 0
    for kill in kills:
        at_work += wait_and_kill(recipe, run_dir, kill, log, draw)
        if read_launches(run_dir.samples):
            audited(run_dir)
            found = recorded(run_dir)
            assert found == recorded(expected)[: len(found)]
    assert at_work > 0.9 * len(kills), "most launches were done before they were to be killed"
    assert not run_dir.result.is_file()
    ranks = start(recipe, Kill(last, 0), log)
    assert [process.wait() for process in ranks] == [0] * last, log.read_text()[-3000:]
    assert [batch for batch, _, _ in recorded(run_dir)] == list(range(steps))
    assert recorded(run_dir) == recorded(expected)
    audit = audited(run_dir)
    assert audit.batches == steps and audit.launches > 0.7 * len(kills)
    begun = {launch.start for launch in read_launches(run_dir.samples)}
    assert len(begun) > 0.5 * len(kills) + 0.5, "guard: they resumed from many places"
    whole = [e for e in audit.epochs if not e.pending]
    assert len(whole) > 1 and {(e.planned, e.trained, e.skipped) for e in whole} == {(42, 42, 0)}
    columns = ("step", "epoch", "num_tokens", "num_label_tokens", "num_samples")
    assert rows(run_dir.path, *columns) == rows(expected.path, *columns)
    ours, theirs = (np.array(rows(of.path, "loss")) for of in (run_dir, expected))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=0)


@pytest.mark.soak
def test_a_killed_run_on_files_of_records_is_the_unbroken_one_bit_for_bit(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Lines with paths of images and a table with their bytes, drawn by weights."""
    per_epoch, steps, kill = 14, 17, Kill(1, 1, asynchronous=True)
    lines = write_records(tmp_path / "lines", "jsonl", range(13))
    table = write_records(tmp_path / "table", "parquet of bytes", range(13, 24))
    sources = [
        {"name": "lines", "path": lines, "weight": 1},
        {"name": "table", "path": table, "weight": 2},
    ]
    values = changed(
        settings,
        data__train=sources,
        data__epoch_size=4 * per_epoch - 2,
        training__max_steps=steps,
        checkpoint__interval_steps=2,
    )
    unbroken = changed(values, run_dir=str(tmp_path / "unbroken"))
    found, log = [], tmp_path / "log"
    for name, each in (("killed", values), ("unbroken", unbroken)):
        recipe = write_recipe(tmp_path / f"{name}.json", each)
        run_dir = RunDir(Path(each["run_dir"]))
        if name == "killed":
            assert wait_and_kill(recipe, run_dir, kill, log, random.Random(5)), "guard: it was done"
            assert not run_dir.result.is_file() and 0 < len(recorded(run_dir)) < steps
            audited(run_dir)
        [process] = start(recipe, kill, log)
        try:
            assert process.wait(WAIT_SECONDS) == 0, log.read_text()[-3000:]
        finally:
            process.kill()
        found.append(run_dir)
    ours, theirs = found
    launches = read_launches(ours.samples)
    assert len(launches) == 2 and 0 < launches[1].start < per_epoch, "guard: amid an epoch"
    audit = audited(ours)
    assert audit.batches == steps and audit.launches == 2
    trained = [sample for _, _, bins in recorded(ours) for bin_ in bins for sample in bin_]
    assert {Path(sample.shard).suffix for sample in trained} == {".jsonl", ".parquet"}
    assert recorded(ours) == recorded(theirs)
    columns = ("step", "epoch", "loss", "grad_norm", "num_tokens", "num_samples")
    assert rows(ours.path, *columns) == rows(theirs.path, *columns)
    assert len(set(rows(ours.path, "loss"))) == steps, "guard: something is learned"
    mine, other = (stored_tensors(r.checkpoints / f"step-{steps:08d}") for r in found)
    assert mine.keys() == other.keys()
    assert all(bool((mine[key] == other[key]).all()) for key in other)
