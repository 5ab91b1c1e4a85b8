"""Process groups end with the run that made them."""

from __future__ import annotations

import os
import sys

import pytest
from support.forked import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = """
from pathlib import Path
from vlmpack.backends.mcore.groups import start_model_parallel
from vlmpack.distributed import start_process_group, stop_process_group
from vlmpack.errors import CapabilityError
from vlmpack.recipe.schema import ParallelismSection

def communication_threads():
    tasks = Path("/proc/self/task").iterdir()
    return sum("gloo" in (task / "comm").read_text() for task in tasks)

for turn in range(2):
    start_process_group()
    start_model_parallel(ParallelismSection())
    try:
        start_model_parallel(ParallelismSection(tensor=2))
    except CapabilityError as error:
        assert "use one process per layout" in str(error)
    else:
        raise AssertionError("another layout in the same groups")
    print(communication_threads())
    stop_process_group()
    print(communication_threads())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_no_thread_of_a_group_outlives_the_run(tmp_path):
    """One that does may abort the interpreter while it shuts down, after the work is done. Groups
    of one layout are not taken for those of another."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = run_ranks([script], 1, timeout=120, environment=environment)
    assert done.returncode == 0, done.stderr
    first, stopped, second, stopped_again = map(int, done.stdout.split())
    assert first > 0
    assert second > 0
    assert (stopped, stopped_again) == (0, 0)
