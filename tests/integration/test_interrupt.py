"""Ctrl-C in a terminal: SIGINT to the whole process group, so to the loader's processes too."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.recipes import changed, rows, write_recipe
from support.whole_runs import in_a_terminal

TIMEOUT = 120


@pytest.mark.soak
def test_an_interrupted_run_says_what_is_saved(settings: dict[str, Any], tmp_path: Path) -> None:
    values = changed(
        settings, training__max_steps=5000, data__num_workers=1, checkpoint__interval_steps=4
    )
    run = Path(values["run_dir"])
    with in_a_terminal(write_recipe(tmp_path / "r.yaml", values)) as process:
        deadline = time.monotonic() + TIMEOUT
        while not (run / "metrics.jsonl").is_file() or len(rows(run, "step")) < 6:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130, output
    saved = sorted(int(f.name[5:]) for f in (run / "checkpoints").glob("step-*"))[-1]
    line = f"interrupted at step {len(rows(run, 'step'))}; the last checkpoint is step {saved}, "
    assert line in output and saved % 4 == 0
    assert "Traceback" not in output
