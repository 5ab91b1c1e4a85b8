"""Whole runs of recipes: launched, stopped after a step, compared, audited."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.forked import run_ranks
from support.recipes import rows
from support.shards import ROOT

from vlmpack.api import resolve, run_recipe
from vlmpack.build.look import open_train
from vlmpack.errors import Preempted
from vlmpack.proof.audit import Audit, audit_run
from vlmpack.run import session as session_module
from vlmpack.training.run_dir import RunDir

TIMEOUT = 280


def environment() -> dict[str, str]:
    """One thread a process, as two share two cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@contextmanager
def in_a_terminal(recipe: Path) -> Iterator[subprocess.Popen[str]]:
    """`vlmpack finetune` as the head of a process group of its own, which gets Ctrl-C as a whole;
    nothing of it is left behind the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "vlmpack", "finetune", str(recipe)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Where the tests run in the background SIGINT is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def launch(recipe: Path, *overrides: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """Run `vlmpack finetune`, under torchrun where there are several processes."""
    head = [sys.executable]
    if processes > 1:
        head += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run(
        [*head, "-m", "vlmpack", "finetune", str(recipe), *overrides],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def finetune_in_ranks(
    recipe: Path, *overrides: str, processes: int
) -> subprocess.CompletedProcess[str]:
    """The same without a launcher, in forked processes."""
    command = ["-m", "vlmpack", "finetune", recipe, *overrides]
    return run_ranks(command, processes, timeout=TIMEOUT, environment=environment())


def assert_same_steps(ours: Path, reference: Path, count: int) -> None:
    """Same batches; loss and gradient norm to 1e-5: sums in another order."""
    same = ("step", "num_tokens", "num_label_tokens", "num_samples")
    assert rows(ours, *same) == rows(reference, *same)
    assert len(rows(ours, "step")) == count
    for (loss, norm), (loss_ref, norm_ref) in zip(
        rows(ours, "loss", "grad_norm"), rows(reference, "loss", "grad_norm"), strict=True
    ):
        assert loss == pytest.approx(loss_ref, rel=1e-5)
        assert norm == pytest.approx(norm_ref, rel=1e-5)


STEPS = 24
"""Four and a bit epochs of 6 steps; the last step of each holds 2 samples instead of 4."""


def run_until(
    settings: dict[str, Any], stop_after: int | None, monkeypatch: Any, *, total: int = STEPS
) -> None:
    """Run; with `stop_after`, as if SIGTERM came while that step was being computed."""
    recipe = resolve(settings, {})
    if stop_after is None:
        run_recipe(recipe)
        return
    original = session_module.Session.steps

    def stopping(self: Any) -> Any:
        for train_step in original(self):
            if self.trainer.totals.step + 1 == stop_after:
                self.trainer.stop.set()
            yield train_step

    with monkeypatch.context() as patch:
        patch.setattr(session_module.Session, "steps", stopping)
        with pytest.raises(Preempted, match=f"stopped at step {stop_after} of {total}"):
            run_recipe(recipe)


def audited(run_dir: str | Path) -> Audit:
    return audit_run(RunDir(Path(run_dir)), open_train(Path(run_dir))[0])
