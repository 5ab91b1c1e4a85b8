"""The walks through the code are those of tools/walks.txt, and no longer than their limits."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.walk import LAUNCH, ROOT, TABLE, profiled

MOST = {"a launch": 269, "a bin": 38, "a step": 23, "a checkpoint": 24}
"""Files; what a stranger reads to follow one."""

LOADER = """
def helper():
    return [item() for _ in range(2)]

def item():
    return 1

class BinDataset:
    def __getitem__(self, index):
        return helper()
"""
STEP = """
from played.data.loading.loader import item

class Stepper:
    def train(self):
        return item()
"""
TRAINER = """
from played.data.loading.loader import BinDataset, helper
from played.training.step import Stepper

def go():
    helper()
    BinDataset()[0]
    Stepper().train()
    helper()
"""


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose run starts three of the four walks."""
    for name, text in {
        "data/loading/loader.py": LOADER,
        "training/step.py": STEP,
        "training/trainer.py": TRAINER,
    }.items():
        path = tmp_path / "played" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "played"
    for name in [name for name in sys.modules if name.partition(".")[0] == "played"]:
        del sys.modules[name]


def test_a_function_belongs_to_the_walk_that_it_is_called_in(played):
    trainer = importlib.import_module("played.training.trainer")
    with profiled(played) as walks:
        trainer.go()
    loader = "data/loading/loader.py"
    assert walks[LAUNCH] == {
        "training/trainer.py": ["go"],
        loader: ["helper", "item"],
    }
    assert walks["a bin"] == {loader: ["BinDataset.__getitem__", "helper", "item"]}
    assert walks["a step"] == {"training/step.py": ["Stepper.train"], loader: ["item"]}
    assert walks["a checkpoint"] == {}


def test_code_of_others_is_no_part_of_a_walk(played):
    with profiled(played / "training") as walks:
        importlib.import_module("played.training.trainer").go()
    assert not walks["a bin"]


@pytest.mark.slow
def test_the_walks_are_those_of_the_table(tmp_path):
    # In a process of its own: what a module runs when it is imported is part of a walk.
    written = tmp_path / "walks.txt"
    subprocess.run([sys.executable, "-m", "tools.walk", written], cwd=ROOT, check=True)
    table = written.read_text(encoding="utf-8").splitlines()
    lengths = dict(re.findall(r"^(\S.*): (\d+) files", "\n".join(table), re.MULTILINE))
    assert lengths.keys() == MOST.keys()
    assert {walk: int(files) for walk, files in lengths.items() if int(files) > MOST[walk]} == {}
    assert table == TABLE.read_text(encoding="utf-8").splitlines(), (
        "`make walk` writes the table anew"
    )
