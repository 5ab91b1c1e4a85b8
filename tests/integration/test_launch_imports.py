"""What a launch imports, collects and reads up to the first step's row, counted and not timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.recipes import changed, write_recipe
from support.shards import ROOT
from support.whole_runs import TIMEOUT, environment

LATER = (
    "matplotlib",
    "pandas",
    "tensorboard",
    "vlmpack.convert",
    "vlmpack.proof.judge",
    "vlmpack.proof.verify",
    "webdataset",
)
"""Packages that no first step needs, or that this recipe's does not."""

COUNTED = """
import collections, gc, json, os, runpy, sys

opened, imported = collections.Counter(), collections.Counter()

def note(event, arguments):
    if event == "import":
        imported["collecting" if gc.isenabled() else "paused"] += 1
    elif event == "open":
        opened[os.path.basename(str(arguments[0]))] += 1

sys.addaudithook(note)
from vlmpack.training import metrics

def write(log, row):
    said = {"modules": list(sys.modules), "imported": imported, "opened": opened}
    print(json.dumps(said | {"full": gc.get_stats()[2]["collections"]}), flush=True)
    sys.exit()

assert "torch" not in sys.modules
metrics.MetricsLog.write = write
"""

BY_COMMAND = "sys.argv[1:1] = ['finetune']; runpy.run_module('vlmpack', run_name='__main__')"
BY_FUNCTION = "import vlmpack; vlmpack.finetune(sys.argv[1])"
WITHOUT_A_PAUSE = """
import contextlib, matplotlib, vlmpack.collector
vlmpack.collector.collector_paused = contextlib.nullcontext
"""


@pytest.fixture
def recipe(settings: dict[str, Any], tmp_path: Path) -> Path:
    values = changed(settings, training__max_steps=1, data__num_workers=1, logging__trackers=[])
    return write_recipe(tmp_path / "recipe.yaml", values)


def counted(recipe: Path, code: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", COUNTED + code, str(recipe)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def faults(found: dict[str, Any]) -> list[str]:
    """What a launch does that it need not."""
    said = [name for name in LATER if name in found["modules"]]
    if found["imported"]["collecting"] > 600:
        said.append("imports while the collector works")
    if found["full"] > 2:
        said.append("full collections")
    most = {"tokenizer.json": 7, "config.json": 54, "model.safetensors": 4}
    said += [name for name, count in most.items() if found["opened"].get(name, 0) > count]
    return said


@pytest.mark.slow
@pytest.mark.parametrize("code", [BY_COMMAND, BY_FUNCTION], ids=["command", "function"])
def test_a_first_step_needs_no_more(recipe: Path, code: str) -> None:
    found = counted(recipe, code)
    assert "transformers.modeling_utils" in found["modules"], "the launch came so far"
    assert found["imported"]["paused"] > 2000 and found["opened"]["tokenizer.json"] > 0
    assert faults(found) == []


@pytest.mark.slow
def test_a_launch_that_needs_more_is_found(recipe: Path) -> None:
    found = counted(recipe, WITHOUT_A_PAUSE + BY_COMMAND)
    assert faults(found) == ["matplotlib", "imports while the collector works", "full collections"]
