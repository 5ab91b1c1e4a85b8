"""The server of loader processes imports without collecting garbage, and its children collect."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PRELOADED = """
import gc
COLLECTED = gc.isenabled()
SHARED = [[number] for number in range(1000)]
"""

CHILD = """
import gc, json

def say():
    import preloaded
    shared = {id(one) for one in preloaded.SHARED}
    seen = sum(id(one) in shared for one in gc.get_objects())
    print(json.dumps([preloaded.COLLECTED, gc.isenabled(), seen]), flush=True)
"""

PROGRAM = """
from vlmpack.data import forkserver
if __name__ == "__main__":
    import child
    %s
    process = forkserver.worker_context(("preloaded",)).Process(target=child.say)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""


def test_a_process_that_imports_it_goes_on_collecting() -> None:
    """As a documentation tool does, which imports every module."""
    program = (
        "import gc, os, vlmpack.data.server_memory as m; before = gc.get_freeze_count()\n"
        "pid = os.fork(); pid or os._exit(gc.get_freeze_count() != before)\n"
        "print(gc.isenabled(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["True", "0"]


@pytest.mark.parametrize(
    ("change", "said"),
    [("pass", [False, True, 0]), ("forkserver._FIRST = 'gc'", [True, True, 1000])],
    ids=["as it is", "control"],
)
def test_the_server_shares_what_its_children_do_not_look_through(
    change: str, said: list[object], tmp_path: Path
) -> None:
    texts = {"preloaded": PRELOADED, "child": CHILD, "program": PROGRAM % change}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "program.py"], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == said
