"""Processes of a replica that meet a fault: all of them end, or all go on, and say why.

TP 2 x PP 2 by default among the slow tests; TP 2 x CP 2 x PP 2, eight processes, in the soak.
"""

from __future__ import annotations

import os
import re
import threading
import time
from math import prod
from pathlib import Path
from typing import Any

import pytest
from support import replica_faults as worker
from support.fault_server import Fault, FaultServer
from support.forked import EndedRanks, run_ranks
from support.recipes import changed, rows, run_settings, write_recipe
from support.whole_runs import assert_same_steps, audited

from vlmpack.api import resolve, run_recipe
from vlmpack.training.checkpoint import step_folder

pytestmark = pytest.mark.slow

STEPS = 6
TWO = {"tensor": 2}
FOUR = {"tensor": 2, "pipeline": 2}
EIGHT = {"tensor": 2, "context": 2, "pipeline": 2}
LAYOUTS = [FOUR, pytest.param(EIGHT, marks=pytest.mark.soak)]
HIT = 1
"""Of the first stage, so that it owns images; not the one that keeps the launcher's store."""
STEP_TIMEOUT = 10
ENDS_WITHIN = 90
"""Seconds, a launch of eight processes on two cores included."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A recipe, and its run in one process on the hf engine."""
    settings = run_settings(
        tmp_path_factory.mktemp("alone"),
        training__max_steps=STEPS,
        training__micro_batch_size=4,
        training__global_batch_size=4 * worker.MICRO_BATCHES,
        data__shuffle="global",
        checkpoint__interval_steps=2,
        logging__watch_seconds=4,
    )
    run_recipe(resolve(settings, {}))
    return settings


def processes_of(layout: dict[str, int]) -> int:
    return prod(layout.values())


def run(
    settings: dict[str, Any], layout: dict[str, int], folder: Path, fault: str = "", **more: Any
) -> EndedRanks:
    """One launch; a second one of the same folder resumes."""
    values = changed(
        settings,
        model__backend="mcore",
        parallelism__step_timeout_seconds=STEP_TIMEOUT,
        run_dir=str(folder / "run"),
        **{f"parallelism__{size}": count for size, count in layout.items()},
        **more,
    )
    done = run_ranks(
        [worker.__file__, write_recipe(folder / "recipe.json", values)],
        processes_of(layout),
        timeout=ENDS_WITHIN,
        environment={**os.environ, "FAULT": fault, "HIT": str(HIT)},
    )
    assert "killed after" not in done.stderr, done.stderr[-3000:]
    return done


def others(done: EndedRanks) -> list[tuple[int, int, str]]:
    """(rank, exit code, what it said) of all but the one that was hit."""
    found = list(zip(range(len(done.codes)), done.codes, done.said, strict=True))
    return [each for each in found if each[0] != HIT]


@pytest.mark.parametrize(
    "fault", ["killed", pytest.param("killed reading", marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_process_ends_all_and_is_named(alone, tmp_path, layout, fault) -> None:
    done = run(alone, layout, tmp_path, fault)
    assert done.codes[HIT] == -9
    size = processes_of(layout)
    for rank, code, said in others(done):
        assert code == 1, (rank, code, said[-2000:])
        lost = f"[rank {rank}] error: lost one of the {size} processes in step "
        assert lost in said or "could not agree on the rows of a step" in said, said[-2000:]
        assert "Traceback" not in said, "of no use to a reader, from each of many processes"
    assert re.search(rf"rank {HIT} \(process \d+ on .*?\) has ended, last heard of", done.stderr)
    assert len(rows(tmp_path / "run", "step")) in (worker.STEP - 2, worker.STEP - 1)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_a_run_of_which_one_process_was_killed_goes_on(alone, tmp_path, layout) -> None:
    assert run(alone, layout, tmp_path, "killed").returncode == -9
    done = run(alone, layout, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"resumed from {step_folder(tmp_path / 'run/checkpoints', 2)}" in done.stderr
    assert_same_steps(tmp_path / "run", Path(alone["run_dir"]), STEPS)
    assert audited(tmp_path / "run").problems == []


@pytest.mark.parametrize("layout", [TWO, LAYOUTS[1]])
def test_sigterm_to_one_process_saves_and_ends_all_with_75(alone, tmp_path, layout) -> None:
    """It comes in a step, so the next one votes to stop; the rows of the one behind that are agreed
    upon meanwhile, in a thread beside the training thread. The first that has ended has the others
    ended, who have said all by then."""
    done = run(alone, layout, tmp_path, "asked to stop")
    assert done.returncode == 75 and set(done.codes) <= {75, -15}, done.stderr[-3000:]
    for said in done.said:
        assert f"stopped at step {worker.STEP + 1} of {STEPS} on SIGTERM" in said
    folders = sorted((tmp_path / "run/checkpoints").iterdir())
    assert folders[-1] == step_folder(tmp_path / "run/checkpoints", worker.STEP + 1)
    assert (folders[-1] / "COMPLETE").is_file()
    assert run(alone, layout, tmp_path).returncode == 0
    assert_same_steps(tmp_path / "run", Path(alone["run_dir"]), STEPS)
    found = audited(tmp_path / "run")
    assert found.problems == [] and found.launches == 2


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_a_process_that_hangs_is_named_and_ends_all_within_the_timeout(
    alone, tmp_path, layout
) -> None:
    """Those that still wait when the first has given up are the launcher's to end."""
    done = run(alone, layout, tmp_path, "stopped")
    assert all(done.codes) and done.returncode == 1, done.codes
    words = ("Timed out waiting", "lost one of the", "could not agree on the rows of a step")
    for _, code, said in others(done):
        assert code == -9 or any(each in said for each in words), said[-2000:]
    assert re.search(rf"rank {HIT} .* has given no sign of life", done.stderr), done.stderr[-3000:]


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_a_shard_that_one_process_alone_cannot_read_ends_all(alone, tmp_path, layout) -> None:
    """Under `skip` too: a disk is no bad sample."""
    policy = {"decode": "skip", "transport": "skip"}
    done = run(alone, layout, tmp_path, "lost shard", data__on_error=policy)
    assert done.returncode == 1 and 1 in done.codes
    for code, said in zip(done.codes, done.said, strict=True):
        assert code in (1, -15), (
            "the launcher may end those that have said it and are slow to leave"
        )
        assert f"OSError: {worker.FAILURE}" in said
        assert f"met by process {HIT} of the 8 that train these rows together" in said


def slow_in_training(server: FaultServer, run_dir: Path, fault: Fault) -> threading.Thread:
    """Let one answer of a store be slow once a step was trained; each process has read some then,
    and all will again."""

    def wait() -> None:
        deadline = time.monotonic() + ENDS_WITHIN
        while time.monotonic() < deadline:
            if (run_dir / "metrics.jsonl").is_file() and rows(run_dir, "step"):
                server.fail(fault)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def served(alone: dict[str, Any], server: FaultServer) -> dict[str, Any]:
    """The recipe with its shard behind HTTP, read anew by every process."""
    *_, bucket, name = Path(alone["data"]["train"]).parts
    return changed(
        alone,
        data__train=f"{server.url}/{bucket}/{name}",
        data__cache={"max_bytes": 0},
        data__storage={"allow_private": True, "read_timeout_seconds": 60.0},
    )


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_one_slow_store_is_named_and_waited_for(alone, tmp_path, layout) -> None:
    with FaultServer(Path(alone["data"]["train"]).parents[1]) as server:
        fault = Fault("latency", seconds=7)
        waiting = slow_in_training(server, tmp_path / "run", fault)
        done = run(served(alone, server), layout, tmp_path)
        waiting.join(5)
    assert fault.times == 0, "nothing was slow"
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"waiting for http://127.0.0.1:\d+/.*?/train-\d+.tar", done.stderr)
    assert_same_steps(tmp_path / "run", Path(alone["run_dir"]), STEPS)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_one_store_slower_than_the_timeout_ends_all(alone, tmp_path, layout) -> None:
    with FaultServer(Path(alone["data"]["train"]).parents[1]) as server:
        fault = Fault("latency", seconds=4 * STEP_TIMEOUT)
        waiting = slow_in_training(server, tmp_path / "run", fault)
        done = run(served(alone, server), layout, tmp_path)
        waiting.join(5)
    assert fault.times == 0 and done.returncode != 0
    assert all(code != 0 for code in done.codes)
    assert re.search(r"waiting for http://127.0.0.1:\d+/.*?/train-\d+.tar", done.stderr)
    assert "could not agree on the rows of a step" in done.stderr
