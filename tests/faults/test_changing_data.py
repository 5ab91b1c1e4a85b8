"""Data that moves under running runs: one cache for four of them, and a shard that is replaced."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest
from faults.deaths import (
    EXACT,
    SHARDS,
    WAIT_SECONDS,
    Launched,
    Setting,
    launch,
    recorded,
    served,
    settings_of,
    write_source,
)
from support.recipes import changed, copy_samples, rows, write_recipe
from support.shards import ROOT
from support.whole_runs import audited

from vlmpack.training.run_dir import RunDir

STEPS = 40
BLOCK = 4 << 20
ROOM = 2 * BLOCK


def ended(run: Launched) -> int:
    try:
        for rank in run.ranks:
            rank.wait(timeout=WAIT_SECONDS)
    finally:
        run.end()
    return int(run.ranks[0].returncode)


@pytest.mark.soak
def test_four_runs_share_a_cache_that_evicts(tmp_path: Path) -> None:
    """Room for two blocks, and each of six shards has its samples in another. One run is killed
    while the others read, and started again."""
    setting = Setting("hf", "store", 1, asynchronous=False)
    address = write_source(tmp_path, setting)
    with served(tmp_path, setting) as endpoint:
        base = settings_of(tmp_path, setting, address, endpoint, STEPS)
        base = changed(base, data__cache__max_bytes=ROOM, data__shuffle="global")

        def start(name: str, cache: str) -> tuple[Launched, Path]:
            folder = tmp_path / name
            mine = changed(base, run_dir=str(folder), data__cache__directory=str(tmp_path / cache))
            recipe = write_recipe(tmp_path / f"{name}.json", mine)
            return launch(recipe, 1, tmp_path / f"{name}.log", launcher=False), folder

        alone, reference = start("alone", "cache-alone")
        assert ended(alone) == 0, (tmp_path / "alone.log").read_text()[-2000:]
        runs = [start(f"run-{number}", "cache") for number in range(4)]
        first = runs[0][0]
        while not (runs[0][1] / "metrics.jsonl").is_file() and first.ranks[0].poll() is None:
            time.sleep(0.02)
        first.end()
        runs.append(start("run-0", "cache"))
        assert [ended(run) for run, _ in runs[1:]] == [0] * 4, [
            (tmp_path / f"run-{number}.log").read_text()[-2000:] for number in range(4)
        ]
        expected = rows(reference, *EXACT)
        assert len(expected) == STEPS
        for _, folder in runs:
            assert rows(folder, *EXACT) == expected
            assert audited(folder).problems == []
    kept = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert 0 < kept <= ROOM + (1 << 20) < SHARDS * BLOCK, "guard: it never had to evict"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose data stay as they are."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert ended(local_run(folder)) == 0, (folder / "log").read_text()[-2000:]
    return folder / "run"


def local_run(folder: Path) -> Launched:
    setting = Setting("hf", "shards", 1, asynchronous=False)
    base = settings_of(folder, setting, write_source(folder, setting), None, STEPS)
    recipe = write_recipe(folder / "r.json", changed(base, run_dir=str(folder / "run")))
    return launch(recipe, 1, folder / "log", launcher=False)


@pytest.mark.soak
@pytest.mark.parametrize("way", ["replaced", "written over", "cut", "removed"])
def test_a_shard_that_changes_under_a_running_step(
    unbroken: Path, tmp_path: Path, way: str
) -> None:
    """What is renamed or removed stays open, so the run goes on as it was. Of what is written over
    every sample is left out and named, until the run ends. The file keeps its size and its time,
    so that only content can tell."""
    run, run_dir, log = local_run(tmp_path), RunDir(tmp_path / "run"), tmp_path / "log"
    while not run_dir.metrics.is_file() or len(rows(run_dir.path, "step")) < 3:
        assert run.ranks[0].poll() is None, log.read_text()[-2000:]
        time.sleep(0.02)
    shard = tmp_path / "data/s-3.tar"
    before, facts = shard.read_bytes(), shard.stat()
    change(shard, way)
    code, expected = ended(run), rows(unbroken, *EXACT)
    assert len(expected) == STEPS
    if way in ("replaced", "removed"):
        assert code == 0 and rows(run_dir.path, *EXACT) == expected
        return
    assert code == 1 and "s-3.tar" in log.read_text(), log.read_text()[-2000:]
    errors = [json.loads(line) for line in run_dir.data_errors.read_text().splitlines()]
    assert {Path(each["shard"]).name for each in errors} == {"s-3.tar"}
    left_out = {(each["batch"], each["key"]) for each in errors}
    trained, whole = samples_of(run_dir), samples_of(RunDir(unbroken))
    assert 3 <= len(trained) < STEPS
    missing = {(batch, key) for batch, keys in trained.items() for key in whole[batch] - keys}
    assert missing and missing <= left_out
    assert all(keys <= whole[batch] for batch, keys in trained.items()), "other samples"
    shard.write_bytes(before)
    os.utime(shard, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert audited(run_dir.path).problems == []


def samples_of(run_dir: RunDir) -> dict[int, set[str]]:
    """The keys of each batch."""
    return {
        batch: {name.key for row in bins for name in row} for batch, _, bins in recorded(run_dir)
    }


def change(shard: Path, way: str) -> None:
    """In one of the ways in which a shard is no longer what it was."""
    facts = shard.stat()
    if way == "removed":
        shard.unlink()
    elif way == "cut":
        os.truncate(shard, facts.st_size // 2)
    elif way == "replaced":
        other = shard.with_suffix(".new")
        copy_samples(ROOT / "assets/digits/train-000002.tar", other, 7, skip=14)
        with other.open("r+b") as file:
            file.truncate(facts.st_size)
        os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        shutil.move(other, shard)
    else:
        data = bytearray(shard.read_bytes())
        for place in random.Random(0).sample(range(len(data)), 400):
            data[place] ^= 0xFF
        with shard.open("r+b") as file:
            file.write(data)
        os.utime(shard, ns=(facts.st_atime_ns, facts.st_mtime_ns))
