"""Ctrl-C in a terminal: SIGINT to the whole process group, so to the loader's processes too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.recipes import changed, rows, write_recipe
from support.shards import ROOT

TIMEOUT = 120


@pytest.mark.soak
def test_an_interrupted_run_says_what_is_saved(settings: dict[str, Any], tmp_path: Path) -> None:
    values = changed(
        settings, training__max_steps=5000, data__num_workers=1, checkpoint__interval_steps=4
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "vlmpack", "finetune", write_recipe(tmp_path / "r.yaml", values)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Where the tests run in the background SIGINT is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    run = Path(values["run_dir"])
    try:
        deadline = time.monotonic() + TIMEOUT
        while not (run / "metrics.jsonl").is_file() or len(rows(run, "step")) < 6:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=TIMEOUT)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 130, output
    saved = sorted(int(f.name[5:]) for f in (run / "checkpoints").glob("step-*"))[-1]
    line = f"interrupted at step {len(rows(run, 'step'))}; the last checkpoint is step {saved}, "
    assert line in output and saved % 4 == 0
    assert "Traceback" not in output
