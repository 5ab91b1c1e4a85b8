"""What a stranger has to read: the files and functions that four walks through the code enter.

    python -m tools.walk [FILE]

Trains the demo for two steps in this process, under `sys.setprofile`, and writes a table of every
function of `vlmpack` that ran. A function belongs to a walk while the walk's own function is on the
stack of its thread; what runs before the first bin belongs to the launch.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tools/walks.txt"

STARTS = {
    ("data/loading/loader.py", "BinDataset.__getitem__"): "a bin",
    ("training/step.py", "Stepper.train"): "a step",
    ("training/trainer.py", "Trainer.save"): "a checkpoint",
}
"""The function that a walk starts with, by file and name -> the walk."""
LAUNCH = "a launch"

Walks = dict[str, dict[str, list[str]]]
"""Walk -> file -> its functions, in the order in which they were first entered."""


class Walker:
    """A profile function that notes the walk of every call."""

    def __init__(self, package: Path) -> None:
        self.package = f"{package}/"
        self.walks: Walks = {LAUNCH: {}, **{walk: {} for walk in STARTS.values()}}
        self._places: dict[int, tuple[CodeType, tuple[str, str] | None]] = {}
        self._threads = threading.local()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        # Every call of every package comes here. A code's hash is that of its bytes, so it is kept
        # by its address, with the code itself, lest another takes that address.
        _, place = self._places.get(id(code)) or self._places.setdefault(
            id(code), (code, self._place(code))
        )
        if place is None:
            return
        under: list[str] = self._threads.__dict__.setdefault("under", [])
        if event == "call":
            if place in STARTS:
                under.append(STARTS[place])
            if under:
                self._note(under[-1], *place)
            elif not self.walks["a bin"]:
                self._note(LAUNCH, *place)
        elif place in STARTS and under:
            under.pop()

    def _place(self, code: CodeType) -> tuple[str, str] | None:
        """The file and the function of code of the package; None for code of others."""
        if not code.co_filename.startswith(self.package):
            return None
        file = code.co_filename.removeprefix(self.package)
        # A comprehension is a function of its own in some versions of Python.
        return file, code.co_qualname.partition(".<locals>")[0]

    def _note(self, walk: str, file: str, function: str) -> None:
        functions = self.walks[walk].setdefault(file, [])
        if function not in functions and function != "<module>":
            functions.append(function)


@contextmanager
def profiled(package: Path) -> Iterator[Walks]:
    """Notes the walks of what is run in the block, on all threads that it starts."""
    walker = Walker(package)
    threading.setprofile(walker)
    sys.setprofile(walker)
    try:
        yield walker.walks
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


BY_TIME = {"Silence.at"}
"""What the watchdog calls once a launch has taken some seconds; a fast one ends before."""


def of_the_demo() -> Walks:
    """The walks of two steps of `recipes/digits-demo.yaml` on one of its shards."""
    import vlmpack

    package = Path(vlmpack.__file__).parent
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, VLMPACK_CACHE=folder),  # no digest is remembered
        profiled(package) as walks,
    ):
        vlmpack.finetune(
            package.parent / "recipes/digits-demo.yaml",
            run_dir=f"{folder}/run",
            data__index_dir=f"{folder}/index",
            data__train="assets/digits/train-000000.tar",
            data__num_workers=0,
            training__max_steps=2,
            evaluation__generate=False,
            evaluation__max_samples=16,
        )
    return {
        walk: {file: functions for file, functions in files.items() if functions}
        for walk, files in walks.items()
    }


def in_words(walks: Walks) -> str:
    """The table: a heading with both counts, and a line a file, as they were first entered.

    Threads share a launch, so its files are in order of their names.
    """
    lines = []
    for walk, entered in walks.items():
        files = entered
        if walk == LAUNCH:
            files = {file: sorted({*entered[file]} - BY_TIME) for file in sorted(entered)}
        count = sum(len(functions) for functions in files.values())
        lines.append(f"{walk}: {len(files)} files, {count} functions")
        lines += [f"  {file}: {', '.join(functions)}" for file, functions in files.items()]
    return "\n".join(lines) + "\n"


def main(target: Path = TABLE) -> None:
    """Write the table, and print its headings."""
    text = in_words(of_the_demo())
    target.write_text(text, encoding="utf-8")
    print("\n".join(line for line in text.splitlines() if not line.startswith(" ")))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
