"""Two torchruns, as on two nodes: whichever processes are started again, all of them meet and go on
from the newest checkpoint, with the losses of a run that nothing happened to."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.recipes import changed, rows, run_settings, write_recipe
from support.shards import ROOT

TIMEOUT = 240
STEPS = 30
EXACT = ("step", "loss", "grad_norm", "num_tokens")


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


class Nodes:
    """Agents of one process each; what they say is in a file each."""

    def __init__(self, folder: Path, recipe: Path, rendezvous: str) -> None:
        port = free_port()
        self.folder, self.recipe = folder, recipe
        self.options = (
            ["--rdzv-backend", "c10d", "--rdzv-id", "a", "--rdzv-endpoint", f"127.0.0.1:{port}"]
            if rendezvous == "c10d"
            else ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        )
        self.agents = [self.start(0), self.start(1)]

    def start(self, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        command += [*self.options, "--node-rank", str(number), "--nproc-per-node", "1"]
        command += ["--max-restarts", "3", "-m", "vlmpack", "finetune", str(self.recipe)]
        with (self.folder / f"node-{number}.log").open("ab") as said:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                stdout=said,
                stderr=said,
            )

    def worker(self, number: int) -> psutil.Process:
        """The process that trains on a node."""
        found = psutil.Process(self.agents[number].pid).children()
        (worker,) = [one for one in found if "vlmpack" in one.cmdline()]
        return worker

    def wait_for(self, run: Path, steps: int) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not (run / "metrics.jsonl").is_file() or len(rows(run, "step")) < steps:
            assert time.monotonic() < deadline, self.said()
            assert all(agent.poll() is None for agent in self.agents), self.said()
            time.sleep(0.05)

    def said(self) -> str:
        logs = sorted(self.folder.glob("node-*.log"))
        return "\n".join(log.read_text(errors="replace")[-4000:] for log in logs)

    def end(self) -> None:
        for agent in self.agents:
            for one in (*_children(agent.pid), agent):
                try:
                    one.send_signal(signal.SIGKILL)
                except (psutil.NoSuchProcess, ProcessLookupError):
                    continue
            agent.wait()


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill_a_worker(nodes: Nodes) -> None:
    nodes.worker(1).kill()


def replace_a_node(nodes: Nodes) -> None:
    """As a cluster does with a pod: agent and process are gone, and others begin at the first
    start."""
    agent = nodes.agents[1]
    for one in (*_children(agent.pid), psutil.Process(agent.pid)):
        one.kill()
    agent.wait()
    nodes.agents[1] = nodes.start(1)


def settings_in(folder: Path) -> dict[str, Any]:
    """Of one order wherever the shard lies: it goes by the source's name."""
    values = run_settings(folder)
    return changed(
        values,
        data__train=[{"path": values["data"]["train"], "name": "digits"}],
        training__micro_batch_size=2,
        training__max_steps=STEPS,
        checkpoint__interval_steps=4,
        checkpoint__keep=2,
        parallelism__timeout_seconds=90,
    )


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """The steps of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("calm")
    values = settings_in(folder)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", "2", "-m", "vlmpack", "finetune"]
    command = [*launcher, str(write_recipe(folder / "r.yaml", values))]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=TIMEOUT)
    return rows(values["run_dir"], *EXACT)


@pytest.mark.parametrize(
    ("rendezvous", "disturb"),
    [
        pytest.param("c10d", kill_a_worker, marks=pytest.mark.soak),
        pytest.param("static", replace_a_node, marks=pytest.mark.soak),
        pytest.param("static", kill_a_worker, marks=pytest.mark.soak),
    ],
)
def test_nodes_meet_again(
    tmp_path: Path, calm: list[tuple[Any, ...]], rendezvous: str, disturb: Any
) -> None:
    values = settings_in(tmp_path)
    run = Path(values["run_dir"])
    nodes = Nodes(tmp_path, write_recipe(tmp_path / "r.yaml", values), rendezvous)
    try:
        nodes.wait_for(run, 6)
        disturb(nodes)
        killed_at = len(rows(run, "step"))
        for agent in nodes.agents:
            assert agent.wait(timeout=TIMEOUT) == 0, nodes.said()
    finally:
        nodes.end()
    resumed = re.search(r"resumed from \S+ at step (\d+)", nodes.said())
    assert resumed is not None and 4 <= int(resumed[1]) <= killed_at + 1 < STEPS
    assert len(calm) == STEPS and rows(run, *EXACT) == calm
