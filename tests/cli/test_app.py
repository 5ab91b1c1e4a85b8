"""How the command's process begins and ends."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import atexit, gc
atexit.register(lambda: print("frozen", gc.get_freeze_count()))  # after those registered later
from vlmpack.cli import main
main()
"""


def test_the_end_collects_no_garbage_among_what_was_imported() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, "--version"], capture_output=True, text=True, check=True
    )
    version, _, frozen = ended.stdout.partition("frozen")
    assert version.startswith("vlmpack ")
    assert int(frozen) > 10_000
