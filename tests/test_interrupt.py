"""SIGINT while a process imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.recipes import run_settings, write_recipe
from support.shards import ROOT
from support.whole_runs import in_a_terminal

SWALLOWED = """
import os, signal
from vlmpack.interrupt import interrupt_ends_at_once
signal.signal(signal.SIGINT, signal.default_int_handler)
with interrupt_ends_at_once():
    {inside}
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("raised behind it")
"""
AN_IMPORT = """
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        print("swallowed")
"""


@pytest.mark.parametrize(
    ("inside", "code", "out", "err"),
    [
        (AN_IMPORT, 130, "", "interrupted before anything was started\n"),
        ("pass", 0, "raised behind it\n", ""),
    ],
    ids=["inside", "behind"],
)
def test_what_an_import_swallows_ends_the_process(
    inside: str, code: int, out: str, err: str
) -> None:
    text = SWALLOWED.format(inside=inside)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


def test_a_process_that_ignores_it_goes_on() -> None:
    """A job in the background is started so."""
    text = SWALLOWED.format(inside=AN_IMPORT)
    text = text.replace(
        "signal.SIGINT, signal.default_int_handler", "signal.SIGINT, signal.SIG_IGN", 1
    )
    text = text.partition("assert")[0]
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.cases(slow="1.2")
@pytest.mark.parametrize("seconds", [0.6, 1.2, 1.8, 2.4, 3.0])
def test_ctrl_c_at_the_start_is_one_line(seconds: float, tmp_path: Path) -> None:
    """The terminal's whole process group has it: the server of the loader's processes too."""
    settings = run_settings(tmp_path, data__num_workers=1, training__max_steps=100_000)
    with in_a_terminal(write_recipe(tmp_path / "r.yaml", settings)) as process:
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "interrupted " in output and "Traceback" not in output
