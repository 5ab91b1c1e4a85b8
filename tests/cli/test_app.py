"""How the command's process begins and ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


STUCK = """
import atexit, sys, threading
from vlmpack.cli import main
from vlmpack.training.trackers import TrackerThread

app_module = sys.modules["vlmpack.cli.app"]
app_module.EXIT_SECONDS = 0.5
for_ever = threading.Event().wait

@app_module.app.command()
def stuck(code: int) -> None:
    print("the result")
    TrackerThread("wandb", for_ever)
    atexit.register(for_ever)  # as W&B waits for what it could not send
    if code:
        raise app_module.typer.Exit(code)

main()
"""


@pytest.mark.cases(quick="75", slow="*")
@pytest.mark.parametrize("code", [0, 75])
def test_a_tracker_that_does_not_come_back_keeps_no_process(code: int) -> None:
    command = [sys.executable, "-c", STUCK, "stuck", str(code)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (code, "the result\n"), ended.stderr
