"""What a command does for longer than two seconds is named, once, and what is short is not."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.shards import ROOT

from vlmpack.activity import IDLE, Activity
from vlmpack.cli.app import app
from vlmpack.waits import STARTING, Waits

SECONDS = 0.2
LATE = 20.0
"""What a loaded machine adds at most."""


def until(said: list[str], count: int) -> None:
    """Wait for so many lines, or for what a loaded machine would need."""
    end = time.monotonic() + LATE
    while len(said) < count and time.monotonic() < end:
        time.sleep(0.01)


def test_each_stage_is_named_once_while_it_lasts() -> None:
    said: list[str] = []
    activity = Activity()
    with Waits(activity, said.append, seconds=SECONDS):
        until(said, 1)
        activity.enter_alone("validation")
        until(said, 2)
        time.sleep(2 * SECONDS)
        activity.enter_alone("validation")  # another one
        until(said, 3)
    assert said == [STARTING, "validation", "validation"]


@pytest.mark.slow
def test_what_comes_with_every_step_is_named_the_first_time_alone() -> None:
    said: list[str] = []
    activity = Activity()
    with Waits(activity, said.append, seconds=SECONDS):
        activity.enter("forward and backward")
        until(said, 1)
        for _ in range(3):
            activity.enter("forward and backward")
            time.sleep(2 * SECONDS)
        activity.enter("optimizer")
        until(said, 2)
    assert said == ["forward and backward", "optimizer"]


def test_a_phase_inside_a_stage_does_not_begin_it_anew() -> None:
    """Shards of half a second each are indexed for long."""
    said: list[str] = []
    activity = Activity()
    with Waits(activity, said.append, seconds=SECONDS):
        activity.enter_alone("indexing")
        end = time.monotonic() + LATE
        while not said and time.monotonic() < end:
            with activity.during("working on a shard", ["a"]):
                time.sleep(SECONDS / 10)
    assert said == ["indexing"]


def test_short_stages_and_none_are_not_named() -> None:
    said: list[str] = []
    activity = Activity()
    with Waits(activity, said.append, seconds=LATE):
        for stage in ("a", "b", IDLE):
            activity.enter_alone(stage)
            time.sleep(SECONDS)
    assert said == []
    with Waits(activity, said.append, seconds=SECONDS):
        activity.enter(IDLE)
        time.sleep(3 * SECONDS)
    assert said == []


LIGHT = {"families", "recipe", "index", "pack"}
"""Commands that are quick, or whose bar says what they do (`cli/progress.py` enters it)."""


def test_every_command_says_what_it_does() -> None:
    """A new one cannot forget it; the stages of `finetune` are the run's."""
    cli = ROOT / "vlmpack/cli"
    commands = {command.callback.__name__: command.callback for command in app.registered_commands}
    assert {"plan", "verify", "merge"} <= commands.keys()
    sources = {
        name: module.read_text(encoding="utf-8")
        if (module := cli / f"{name}.py").is_file()
        else inspect.getsource(command)
        for name, command in commands.items()
    }
    silent = {name for name, source in sources.items() if "ACTIVITY.enter" not in source}
    assert silent <= LIGHT | {"finetune"}


SLOW_IMPORT = """
import sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            time.sleep(3.0)

sys.meta_path.insert(0, Slow())
"""


@pytest.mark.slow
def test_a_slow_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    ran = subprocess.run(
        [sys.executable, "-m", "vlmpack", "plan", "recipes/digits-demo.yaml", "--json", "-"],
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{'waiting':14} {STARTING}" in ran.stderr.splitlines()
    assert ran.stdout.lstrip().startswith("{"), "standard output stays clean"


FROM_PYTHON = """
import logging, vlmpack

logging.basicConfig(level=logging.INFO, format="%(message)s")
vlmpack.finetune("recipes/digits-demo.yaml", data__train="no.tar", run_dir=RUN)
"""


@pytest.mark.soak
def test_a_slow_import_is_named_from_python(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    ran = subprocess.run(
        [sys.executable, "-c", FROM_PYTHON.replace("RUN", repr(str(tmp_path / "run")))],
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "data.train: 'no.tar' matches no file" in ran.stderr, "it ended elsewhere"
    assert f"{'waiting':14} {STARTING}" in ran.stderr.splitlines()
