"""The picture of a leak in docs/recurrence.md is what `verify` finds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from PIL import Image
from support.shards import ROOT


@pytest.mark.soak
def test_it_is_drawn_from_the_leak_test(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "leak.png"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "benchmarks/leak_picture.py"), str(path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    words = [line.split("leak test: ")[1].split(",")[0] for line in ran.stdout.splitlines()]
    assert words == ["FAIL", "FAIL", "pass"]
    with Image.open(path) as drawn, Image.open(ROOT / "docs/images/leak.png") as shown:
        assert drawn.size == shown.size == (1000, 920)
    assert (ROOT / "docs/images/leak.png").stat().st_size < 40_000
