"""Real runs prove themselves: killed and resumed, with bad samples, from a store."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.fault_server import FaultServer
from support.recipes import changed, copy_samples, rewrite, write_recipe
from support.shards import ROOT
from support.whole_runs import audited
from typer.testing import CliRunner

from vlmpack.api import resolve, run_recipe
from vlmpack.cli.app import app
from vlmpack.training.run_dir import RunDir

pytestmark = pytest.mark.slow


def break_images(shard: Path, count: int) -> list[str]:
    """Cut the pixels of some images off, headers left whole; the keys of their samples."""
    broken: list[str] = []

    def change(name: str, data: bytes) -> bytes:
        if name.endswith(".jpg") and len(broken) < count and name.partition(".")[0] not in broken:
            broken.append(name.partition(".")[0])
            return data[: len(data) // 2]
        return data

    rewrite(shard, change)
    assert len(broken) == count
    return broken


def start(recipe: Path, processes: int) -> list[subprocess.Popen[bytes]]:
    """The ranks of a run without a launcher, so that each can be killed by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "vlmpack", "finetune", str(recipe)],
            cwd=ROOT,
            env=os.environ
            | {name: str(value) for name, value in shared.items()}
            | {"OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(processes)
    ]


@pytest.mark.soak
def test_a_killed_run_with_bad_samples_is_proven(
    settings: dict[str, Any], shard: Path, tmp_path: Path
) -> None:
    """Two processes, killed between checkpoints; one process goes on for four epochs."""
    bad = break_images(shard, 2)
    values = changed(
        settings,
        training__global_batch_size=8,
        training__max_steps=12,
        checkpoint__interval_steps=2,
        data__on_error={"decode": "skip"},
    )
    recipe = write_recipe(tmp_path / "recipe.json", values)
    run_dir = RunDir(Path(values["run_dir"]))
    processes = start(recipe, 2)
    try:
        deadline = time.monotonic() + 200
        while min(len(_lines(run_dir.samples / f"rank-000{n}.jsonl")) for n in range(2)) < 3:
            assert all(p.poll() is None for p in processes) and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    half = audited(run_dir.path)
    assert half.problems == [] and 3 <= half.batches < 12
    run_recipe(resolve(values, {}))
    found = audited(run_dir.path)
    assert found.problems == [] and (found.batches, found.launches) == (12, 2)
    counts = [(e.planned, e.trained, e.skipped, e.pending) for e in found.epochs]
    assert counts == [(22, 20, 2, 0)] * 4
    ledger = [line["key"] for line in _lines(run_dir.data_errors)]
    assert sorted(ledger) == sorted(bad * 4)


def test_resumed_in_the_middle_of_an_epoch_then_tampered_with(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    values = changed(settings, training__max_steps=4)
    run_recipe(resolve(values, {}))
    run_recipe(resolve(changed(values, training__max_steps=9), {}))
    run_dir = RunDir(Path(values["run_dir"]))
    run = str(run_dir.path)
    told = CliRunner().invoke(app, ["data", "audit", run])
    assert told.exit_code == 0 and "proven: 9 global batches in 2 launches" in told.output
    kept = json.loads(run_dir.audit.read_text())
    assert kept["proven"] is True and kept["batches"] == 9
    key = json.loads((run_dir.samples / "rank-0000.jsonl").read_text().splitlines()[6])["bins"][0][
        0
    ]
    shown = CliRunner().invoke(app, ["data", "show", run, "--key", key.partition("/")[2]])
    assert shown.exit_code == 0
    assert "trained in batch 6, epoch 1" in shown.output and shown.output.count("trained in") == 2
    path = run_dir.samples / "rank-0000.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    told = CliRunner().invoke(app, ["data", "audit", run, "--json"])
    report = json.loads(told.output)
    assert told.exit_code == 1 and report["proven"] is False
    assert json.loads(run_dir.audit.read_text()) == report
    assert "step-00000009 holds 9 steps, the record 8" in report["problems"][0]


@pytest.mark.soak
def test_a_run_from_a_store_that_is_indexed_on_the_way(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Shuffled by window, pending samples at first an estimate; `vlmpack index` makes it exact."""
    (tmp_path / "served/bucket").mkdir(parents=True)
    for number in range(3):
        path = tmp_path / f"served/bucket/train-{number}.tar"
        copy_samples(ROOT / "assets/digits/train-000000.tar", path, 6, skip=6 * number)
    with FaultServer(tmp_path / "served") as server:
        values = changed(
            settings,
            data__train="s3://bucket/train-*.tar",
            data__storage={"endpoint": server.url, "allow_private": True, "anonymous": True},
            data__cache={"max_bytes": 0},
            training__max_steps=7,
        )
        recipe = write_recipe(tmp_path / "recipe.json", values)
        lint = CliRunner().invoke(
            app, ["data", "lint", "--recipe", str(recipe), "--processes", "1"]
        )
        assert lint.exit_code == 0 and "3 files, 18 samples" in lint.output
        run_recipe(resolve(changed(values, training__max_steps=3), {}))
        half = audited(values["run_dir"])
        assert (half.problems, half.batches) == ([], 3) and half.epochs[0].pending == 6
        run_recipe(resolve(values, {}))
        found = audited(values["run_dir"])
        assert found.problems == [] and (found.batches, found.launches) == (7, 2)
        assert [(e.planned, e.trained, e.pending) for e in found.epochs] == [
            (18, 18, 0),
            (18, 8, 10),
        ]
        indexed = CliRunner().invoke(app, ["index", "--recipe", str(recipe), "--processes", "1"])
        assert indexed.exit_code == 0 and "3 (0 read now, 0 faulty)" in indexed.output
        with_options = ["index", "s3://bucket/train-{0..2}.tar", "--index-dir", str(tmp_path / "o")]
        for item in (f"endpoint={server.url}", "allow_private=true", "anonymous=true"):
            with_options += ["--storage", item]
        told = CliRunner().invoke(app, [*with_options, "--processes", "2"])
        assert told.exit_code == 0 and "3 (3 read now, 0 faulty)" in told.output


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]
