"""Commands other than `finetune` that are killed at random moments, and then run to their end.

What they leave is what an unbroken one leaves, byte for byte. No process stays, and nothing in
shared memory. A command that ended before it was killed is drawn again.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from faults.deaths import MARK, ORPHAN_SECONDS, Launched, mapped, shared_memory
from support.pairs import raw_pairs, write_pairs
from support.recipes import changed, copy_samples, run_settings, write_recipe
from support.shards import ROOT, TINY_MODEL

from vlmpack import finetune

SHARDS = 4


@dataclass
class Command:
    """A command, and the folder in which it leaves what is compared; None: it leaves nothing."""

    arguments: list[str]
    output: Path | None


def write_data(folder: Path) -> dict[str, Any]:
    """Settings of a run on a few shards."""
    for number in range(SHARDS):
        source = ROOT / f"assets/digits/train-00000{number}.tar"
        copy_samples(source, folder / f"s-{number}.tar", 40)
    return changed(
        run_settings(folder),
        data__train=f"{folder}/s-{{0..{SHARDS - 1}}}.tar",
        data__index_dir=str(folder / "index"),
        training__max_steps=2,
    )


def index(folder: Path) -> Command:
    settings = write_data(folder)
    recipe = write_recipe(folder / "recipe.json", settings)
    return Command(["index", "--recipe", str(recipe), "--processes", "2"], folder / "index")


def pack(folder: Path) -> Command:
    settings = changed(
        write_data(folder),
        packing__max_tokens=512,
        packing__mode="online",
        training__micro_batch_size=1,
    )
    recipe = write_recipe(folder / "recipe.json", settings)
    more = ["--kind", "tokens", "--processes", "2"]
    return Command(["pack", str(recipe), "-o", str(folder / "packs"), *more], folder / "packs")


def export(folder: Path) -> Command:
    finetune(changed(write_data(folder), trainable__language="lora", export__enabled=False))
    out = str(folder / "out")
    return Command(["export", str(folder / "run"), "--merge", "-o", out], folder / "out")


def merge(folder: Path) -> Command:
    finetune(changed(write_data(folder), trainable__language="lora", export__enabled=False))
    subprocess.run(
        [sys.executable, "-m", "vlmpack", "export", str(folder / "run"), "-o", folder / "adapter"],
        check=True,
    )
    places = [str(TINY_MODEL), str(folder / "adapter")]
    return Command(["merge", *places, "-o", str(folder / "out")], folder / "out")


def reference(folder: Path) -> Command:
    write_pairs(folder / "pairs.tar", raw_pairs(0) * 4)
    settings = changed(
        run_settings(folder),
        data__train=str(folder / "pairs.tar"),
        objective={"name": "dpo", "reference_dir": str(folder / "reference")},
    )
    recipe = write_recipe(folder / "recipe.json", settings)
    return Command(["reference", str(recipe)], folder / "reference")


def measure(folder: Path) -> Command:
    recipe = write_recipe(folder / "recipe.json", write_data(folder))
    return Command(["plan", str(recipe), "--measure"], None)


def start(command: Command, log: Path) -> Launched:
    mark = uuid.uuid4().hex
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vlmpack", *command.arguments],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", MARK: mark},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return Launched([process], mark, log, launcher=False)


def finished(command: Command, log: Path) -> tuple[float, dict[str, str]]:
    """Run it to its end: seconds, and the digest of each file that it leaves."""
    begun, run = time.monotonic(), start(command, log)
    try:
        assert run.ranks[0].wait(300) == 0, log.read_text()[-3000:]
    finally:
        run.end()
    return time.monotonic() - begun, digests(command.output)


def digests(folder: Path | None) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (folder.rglob("*") if folder is not None else ())
        if path.is_file() and path.suffix != ".lock"  # it names the process that held it
    }


@pytest.mark.parametrize("deaths", [pytest.param(6, marks=pytest.mark.soak)])
@pytest.mark.parametrize("make", [index, pack, export, merge, reference, measure])
def test_a_killed_command_is_done_by_the_same_command(
    tmp_path: Path, make: Callable[[Path], Command], deaths: int, record_property: Any
) -> None:
    log = tmp_path / "log"
    command = make(tmp_path)
    listed = {path.name for path in tmp_path.iterdir()}
    seconds, expected = finished(command, log)
    if command.output is not None:
        assert expected, "guard: it leaves nothing"
        shutil.rmtree(command.output)
    draw, died, own = random.Random(make.__name__), 0, set[str]()
    for _ in range(5 * deaths):
        run = start(command, log)
        try:
            time.sleep(seconds * draw.uniform(0.3, 1))
            died += run.ranks[0].poll() is None
            own |= mapped(process.pid for process in run.alive())
            run.ranks[0].send_signal(signal.SIGKILL)
            run.ranks[0].wait()
            # A fork server that was just started imports first.
            limit = time.monotonic() + max(ORPHAN_SECONDS, 2 * seconds)
            while (left := run.alive()) and time.monotonic() < limit:
                time.sleep(0.05)
            assert left == [], [psutil.Process(one.pid).cmdline() for one in left]
        finally:
            run.end()
        if died == deaths:
            break
        if command.output is not None and died == 0:
            shutil.rmtree(command.output, ignore_errors=True)
    assert died == deaths, "guard: it ends before it is killed"
    if digests(command.output) != expected:
        assert finished(command, log)[1] == expected
    elif command.output is None:
        finished(command, log)
    known = {"log", "index", "run", *([] if command.output is None else [command.output.name])}
    left_over = {path.name for path in tmp_path.iterdir()} - listed - known
    # docs/plan.md says so of a measurement.
    assert not [name for name in left_over if not name.startswith("run.measured-")], left_over
    limit = time.monotonic() + ORPHAN_SECONDS
    while (memory := own & shared_memory()) and time.monotonic() < limit:
        time.sleep(0.2)
    assert not memory
    record_property("injections", died)
