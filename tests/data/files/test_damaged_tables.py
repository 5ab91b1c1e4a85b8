"""Tables and saved data sets that are damaged by lot end in an error with a name.

They are read in a process of its own, which pyarrow's C++ code may end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.damaged_tables import KINDS


def check(folder: Path, kinds: tuple[str, ...], count: int) -> None:
    """Read so many damaged copies of each kind."""
    command = [sys.executable, "-m", "support.damaged_tables", str(folder), str(count), *kinds]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    lines = ended.stdout.splitlines()
    assert not ended.returncode, (ended.returncode, lines[-1:], ended.stderr[-1000:])
    assert not [line for line in lines if line.split()[2] == "bare"]
    ends = Counter(tuple(line.split()[:3:2]) for line in lines)
    print(ends)
    assert sum(ends.values()) == count * len(kinds)
    for kind in kinds:
        assert ends[kind, "named"] > count / 10, "vacuous: nothing was damaged"
        assert ends[kind, "read"] or count < 100, "vacuous: nothing came through the first check"


def test_no_bare_exception_and_no_end_of_the_process(tmp_path: Path) -> None:
    check(tmp_path, KINDS, 12)


@pytest.mark.slow
def test_more_of_them(tmp_path: Path) -> None:
    check(tmp_path, KINDS, 100)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_them(tmp_path: Path, kind: str) -> None:
    check(tmp_path, (kind,), 5000)
