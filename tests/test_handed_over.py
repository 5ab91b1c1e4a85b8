"""Code of a program's own: an exit is an error, a forked child goes no further, a death is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlmpack.handed_over import CALLS, calling, clear_left_behind

SCRIPT = """
import os, sys
from pathlib import Path
from vlmpack.activity import ACTIVITY
from vlmpack.handed_over import CALLS, calling

def code():
    {code}

ACTIVITY.step = 3
with CALLS.kept_in(Path(sys.argv[1]), 0):
    with calling("callback Mine.on_step", lambda error: RuntimeError(f"found {{error!r}}")):
        code()
    print("went on", flush=True)
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT.format(code=code), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(), GeneratorExit(), ValueError("x")])
def test_what_would_end_the_process_is_an_error(error: BaseException) -> None:
    with (
        pytest.raises(RuntimeError, match=type(error).__name__) as caught,
        calling("mine", lambda found: RuntimeError(repr(found))),
    ):
        raise error
    assert caught.value.__cause__ is error


def test_an_interrupt_stays_one_and_an_error_may_pass() -> None:
    with pytest.raises(KeyboardInterrupt), calling("mine", lambda _: RuntimeError()):
        raise KeyboardInterrupt
    passes = ValueError("mine")
    with pytest.raises(ValueError) as caught, calling("mine", lambda _: passes):
        raise passes
    assert caught.value is passes


@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        ("return", "came back"),
        ("raise KeyError('mine')", "raised KeyError: 'mine' (<string>, line"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
        ("sys.exit(0)", ""),
        ("os._exit(0)", ""),
    ],
)
def test_a_forked_child_goes_no_further(tmp_path: Path, leaves: str, said: str) -> None:
    """The process itself goes on, once."""
    code = f"child = os.fork()\n    if not child: {leaves}\n    print(os.waitpid(child, 0)[1])"
    done = run(code, tmp_path)
    assert done.returncode == 0 and done.stdout.count("went on") == 1, done.stderr
    assert done.stdout.startswith("256\n" if said else "0\n"), "the child's end"
    assert ("callback Mine.on_step: process" in done.stderr) is bool(said)
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("ends", ["os._exit(0)", "os.kill(os.getpid(), 9)", "os.abort()"])
def test_the_next_launch_hears_inside_which_code_the_last_one_ended(
    tmp_path: Path, ends: str
) -> None:
    done = run(ends, tmp_path)
    assert "went on" not in done.stdout
    [line] = clear_left_behind(tmp_path)
    assert "ended inside callback Mine.on_step at step 3 (process" in line
    assert clear_left_behind(tmp_path) == [] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", ["return", "raise SystemExit(0)"])
def test_a_call_that_leaves_by_itself_leaves_nothing_behind(tmp_path: Path, code: str) -> None:
    done = run(code, tmp_path)
    assert ("went on" in done.stdout) is (code == "return") and done.returncode == (
        code != "return"
    )
    assert not list(tmp_path.iterdir())


def test_two_calls_at_once_are_both_named(tmp_path: Path) -> None:
    """A thread reads a source while an objective is asked; outside of a run nothing is written."""
    with CALLS.kept_in(tmp_path, 1):
        with calling("objective focal", lambda _: RuntimeError()):
            with calling("python:mine[7]", lambda _: RuntimeError()):
                entry = json.loads((tmp_path / "calling-1.json").read_bytes())
            after = json.loads((tmp_path / "calling-1.json").read_bytes())
        assert clear_left_behind(tmp_path) == [], "nothing is called now"
    assert entry["calls"] == ["objective focal", "python:mine[7]"] and entry["pid"] == os.getpid()
    assert after["calls"] == ["objective focal"]
    with calling("mine", lambda _: RuntimeError()):
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[]", "[" * 9000, '{"calls": ["x"]}', "\xff", '{"calls": 3}'])
def test_a_file_of_another_kind_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "calling-0.json").write_text(text, encoding="latin-1")
    os.mkfifo(tmp_path / "calling-1.json")
    assert clear_left_behind(tmp_path) == []
