"""`python -m vlmpack` of the current folder, which writes the seconds of a launch by phase.

    VLMPACK_PHASES=FILE python benchmarks/launch_phases.py finetune RECIPE ...

FILE holds one JSON object when the first step's row is written: phase -> seconds, in the order of
the launch. The time of a phase that runs inside another one is its own alone. `imports` is what
modules take, wherever they are imported.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

PHASES = {
    "vlmpack.recipe.load": {"load_recipe": "recipe"},
    "vlmpack.build.data": {"build_encoder": "encoder", "open_split": "index and plan"},
    "vlmpack.build.engine": {"check_model": "check of the folder", "build_engine": "model"},
    "vlmpack.data.splits.split": {"probe_lengths": "probe of lengths"},
    "vlmpack.training.trackers": {"Trackers.__init__": "trackers"},
    "vlmpack.run.session": {"Prefetch.start": "loader's start", "Session._steps": "first batch"},
    "vlmpack.training.step": {
        "Stepper.train": "first step",
        "TrainabilityCheck.before_step": "check of the first step",
        "TrainabilityCheck.after_step": "check of the first step",
    },
    "vlmpack.training.metrics": {"MetricsLog.write": "end"},
}
"""Module -> function -> the phase that it is."""

REST = "everything else"


class Clock:
    """Seconds of each phase, of this process until `end`."""

    def __init__(self) -> None:
        self.seconds = {REST: 0.0}
        self._running = [REST]
        self._since = time.perf_counter()

    def enter(self, phase: str) -> None:
        self._count()
        self.seconds.setdefault(phase, 0.0)
        self._running.append(phase)

    def leave(self) -> None:
        self._count()
        self._running.pop()

    def _count(self) -> None:
        now = time.perf_counter()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def end(self) -> None:
        """Write them, the first time."""
        self._count()
        path = os.environ.pop("VLMPACK_PHASES", None)
        if path is not None:
            Path(path).write_text(json.dumps(self.seconds))

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function; a generator's first item is waited for in the phase."""

        def call(*arguments: Any, **options: Any) -> Any:
            if phase == "end":
                self.end()
            self.enter(phase)
            try:
                made = function(*arguments, **options)
            finally:
                self.leave()
            return self._items(phase, made) if phase == "first batch" else made

        return call

    def _items(self, phase: str, items: Any) -> Any:
        while True:
            self.enter(phase)
            try:
                item = next(items, None)
            finally:
                self.leave()
            if item is None:
                return
            yield item

    def on_module(self, module: ModuleType) -> None:
        """Time the functions of a module that has just been imported."""
        for name, phase in PHASES.get(module.__name__, {}).items():
            owner, _, function = name.rpartition(".")
            holder = getattr(module, owner) if owner else module
            setattr(holder, function, self.timed(phase, getattr(holder, function)))


def time_imports(clock: Clock, loader: Any) -> None:
    """Count what the modules of a loader take."""
    execute = loader.exec_module

    def exec_module(self: Any, module: ModuleType) -> None:
        clock.enter("imports")
        try:
            execute(self, module)
            clock.on_module(module)
        finally:
            clock.leave()

    loader.exec_module = exec_module


if __name__ == "__main__":
    clock = Clock()
    for loader in (SourceFileLoader, ExtensionFileLoader):
        time_imports(clock, loader)
    sys.path[0] = str(Path.cwd())
    sys.argv[0] = str(getattr(find_spec("vlmpack"), "origin", "vlmpack"))
    runpy.run_module("vlmpack", run_name="__main__", alter_sys=True)
