"""The Pythons that have different versions of megatron-core here: the environment's own, and the
one of `make megatron`, with the newest before what the environment has."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.shards import ROOT

OWN = ROOT / ".venv/bin/python"
NEWEST = ROOT / ".megatron/bin/python"
WANTED = ROOT / "tests/support/megatron_packages.txt"
ASK = "from importlib.metadata import version; print(version('megatron-core'))"


def version_of(python: Path) -> str:
    """The megatron-core that a Python finds; empty where there is none."""
    asked = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=False)
    return asked.stdout.strip()


def why_not_two() -> str | None:
    """One phrase, where there are not two versions here."""
    stamp = NEWEST.parents[1] / ".installed"
    if not stamp.exists():
        return "make megatron installs the newest megatron-core: .megatron is not there"
    if stamp.read_text() != WANTED.read_text():
        return "make megatron installs other versions than .megatron has (megatron_packages.txt)"
    if not OWN.exists():
        return "the environment of the Makefile, .venv, is not there"
    found = version_of(OWN), version_of(NEWEST)
    return None if all(found) and found[0] != found[1] else f"both Pythons have {found[0]!r}"
