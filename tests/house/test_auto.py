"""An `auto` is resolved in one place: the layers below are handed what it came to."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support.shards import ROOT

ROOMS = ("recipe", "build", "cli", "report")
"""Those that say what a knob may be, resolve it, or take it from a user."""

DECIDERS = {
    "attention/varlen.py": "the fastest kernel, from device and dtype alone",
    "backends/fused.py": "the fastest kernels, from the device and what is installed",
    "data/columns/chat.py": "a value of the converted format, no knob",
    "data/files/records.py": "the form of a user's records, no knob of a recipe",
    "data/packs/manifest.py": "what a recipe leaves open is as its saved packs have it",
    "data/splits/survey.py": "data.shuffle, from the shards found: the survey holds the outcome",
    "families/tower_attention.py": "towers take the fastest kernel whatever the recipe says",
    "own_loop.py": "a public default, for whoever has no recipe",
    "proof/verify/packed.py": "a kernel without float32 gives way before the engine is built",
    "recurrence/choose.py": "the fastest kernels, from device and dtype alone",
    "run/doctor.py": "asks what auto comes to on this machine, and says it",
    "run/replay.py": "checkpoint.resume, in a folder of its own that holds none",
    "run/result.py": "export.dtype, from the folder that was pretrained",
    "training/metrics.py": "logging.progress, from the terminal that it opens",
}
"""Modules that may name it -> why."""


def knowing_auto(root: Path) -> set[str]:
    """The modules outside those rooms in which the string is: a default, a type, a comparison."""
    found = set()
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if name.partition("/")[0] not in ROOMS and any(
            isinstance(node, ast.Constant) and node.value == "auto" for node in nodes
        ):
            found.add(name)
    return found


@pytest.mark.slow
def test_auto_is_known_to_those_who_resolve_it_alone() -> None:
    assert knowing_auto(ROOT / "vlmpack") == DECIDERS.keys()


def test_an_engine_that_resolves_it_is_found(tmp_path: Path) -> None:
    told = {
        "backends/compared.py": 'if model.dtype == "auto": pass\n',
        "backends/matched.py": 'match model.attention:\n    case "auto": pass\n',
        "data/typed.py": 'def shuffle() -> Literal["auto", "global"]: ...\n',
        "run/default.py": 'def start(resume="auto"): ...\n',
    }
    quiet = {
        "build/engine.py": 'if model.dtype == "auto": pass\n',
        "backends/said.py": '"""Of `model.dtype: auto`."""\nwhy = "use auto or segments"\n',
    }
    for name, text in {**told, **quiet}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert knowing_auto(tmp_path) == told.keys()
