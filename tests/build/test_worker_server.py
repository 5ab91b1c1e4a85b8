"""The server that loader workers fork from starts before the launch imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vlmpack.build import worker_server
from vlmpack.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]

LAUNCH = """
import json, sys

from vlmpack.data import forkserver

def start(preload=()):
    print(json.dumps({"preload": preload, "torch": "torch" in sys.modules}))
    sys.stdout.flush()
    sys.exit(0)

forkserver.start_server = start
%s
"""

BY_COMMAND = "from vlmpack.cli.app import main; sys.argv[1:1] = ['finetune']; main()"
BY_FUNCTION = "import vlmpack; vlmpack.finetune(sys.argv[1], run_dir='x', data__num_workers=%d)"


def launched(code, *arguments):
    """What the server was started with, or None."""
    program = LAUNCH % code
    done = subprocess.run(
        [sys.executable, "-c", program, str(ROOT / "recipes/digits-demo.yaml"), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[0]) if lines else None


@pytest.mark.cases(slow="vlmpack finetune")
@pytest.mark.parametrize(
    "code", [BY_COMMAND, BY_FUNCTION % 1], ids=["vlmpack finetune", "vlmpack.finetune"]
)
def test_the_server_starts_before_torch_is_imported(code):
    started = launched(code)
    assert started is not None, "the server was not started"
    assert not started["torch"]
    assert "transformers.models.auto.image_processing_auto" in started["preload"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_server_where_the_training_process_loads_by_itself(num_workers, monkeypatch):
    started = []
    monkeypatch.setattr(worker_server, "start_server", started.append)
    recipe = load_recipe(ROOT / "recipes/digits-demo.yaml", {"data.num_workers": num_workers})
    worker_server.start_worker_server(recipe)
    assert started == ([worker_server.WORKER_PRELOAD] if num_workers else [])
