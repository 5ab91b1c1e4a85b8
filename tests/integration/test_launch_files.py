"""docs/launch: each file is read, its torchrun line runs with two local processes, and a process
that is killed is started again with all others, from the newest checkpoint."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.recipes import changed, rows, write_recipe
from support.shards import ROOT

LAUNCH = ROOT / "docs" / "launch"
TIMEOUT = 200
EXACT = ("step", "loss", "grad_norm", "num_tokens")


def two_processes(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return changed(settings, training__micro_batch_size=2, **changes)


def environment(folder: Path, **more: str) -> dict[str, str]:
    """One thread each, torchrun and stand-ins of a cluster's commands on the path."""
    path = os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": path, **more}


def stand_ins(folder: Path) -> Path:
    """`srun` that runs its command here, `scontrol` that writes down what it is asked."""
    folder.mkdir(exist_ok=True)
    srun = 'SLURM_NODEID=0 exec "$@"'
    scontrol = f'echo "$@" >> {folder}/asked; [ "$1" = show ] && echo 127.0.0.1 || true'
    torchrun = f'exec {sys.executable} -m torch.distributed.run "$@"'
    for name, body in (("srun", srun), ("scontrol", scontrol), ("torchrun", torchrun)):
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return folder


def slurm(folder: Path) -> dict[str, str]:
    return environment(
        stand_ins(folder / "bin"),
        SLURM_JOB_NAME="vlmpack",
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="here",
        SLURM_NNODES="1",
        GPUS="2",
    )


def test_slurm_asks_in_time_and_requeues() -> None:
    text = (LAUNCH / "slurm.sh").read_text()
    assert subprocess.run(["bash", "-n", LAUNCH / "slurm.sh"], check=False).returncode == 0
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?", text, re.M))
    assert asked["signal"] == "B:USR1@300" and "requeue" in asked
    assert asked["ntasks-per-node"] == "1" and int(asked["nodes"]) > 1


@pytest.mark.parametrize(
    ("ends", "signalled", "code", "requeued"),
    [("exit 0", False, 0, False), ("exit 9", False, 9, False), ("exit 75", True, 0, True)],
)
def test_slurm_goes_by_how_the_run_ended(
    tmp_path: Path, ends: str, signalled: bool, code: int, requeued: bool
) -> None:
    """And not by the result of a shorter run in the same folder, which a longer one finds there."""
    given, run = slurm(tmp_path), tmp_path / "run"
    run.mkdir()
    (run / "result.json").write_text("{}")
    waits = f"touch {tmp_path}/begun; trap '{ends}' TERM; while :; do sleep 0.1; done"
    srun = tmp_path / "bin" / "srun"
    srun.write_text(f"#!/bin/bash\n{waits if signalled else ends}\n")
    command = ["bash", LAUNCH / "slurm.sh", "my.yaml"]
    process = subprocess.Popen(command, env=given | {"RUN_DIR": str(run)})
    if signalled:
        deadline = time.monotonic() + TIMEOUT
        while not (tmp_path / "begun").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
    assert process.wait(TIMEOUT) == code
    assert ("requeue 7" in (tmp_path / "bin" / "asked").read_text()) == requeued


def test_kubernetes_has_one_torchrun_a_node_and_time_to_save() -> None:
    job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    nodes = sum(each["replicas"] for each in replicas.values())
    for each in replicas.values():
        pod = each["template"]["spec"]
        [container] = pod["containers"]
        assert f"--nnodes={nodes}" in container["command"]
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert f"--nproc-per-node={gpus}" in container["command"]
        assert job["spec"]["nprocPerNode"] == str(gpus)
        assert pod["terminationGracePeriodSeconds"] >= 300
        assert each["restartPolicy"] == "OnFailure"
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_skypilot_names_its_nodes() -> None:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert task["num_nodes"] > 1 and "/runs" in task["file_mounts"]
    for variable in ("NUM_NODES", "NODE_RANK", "NUM_GPUS_PER_NODE", "NODE_IPS"):
        assert f"$SKYPILOT_{variable}" in task["run"]


def command_of(
    kind: str, folder: Path, recipe: Path, run: Path
) -> tuple[list[str], dict[str, str]]:
    """A file's own command with one node of two processes, and its environment."""
    if kind == "slurm":
        return ["bash", str(LAUNCH / "slurm.sh"), str(recipe)], slurm(folder) | {
            "RUN_DIR": str(run)
        }
    path = stand_ins(folder / "bin")
    if kind == "skypilot":
        task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
        given = {"NUM_NODES": "1", "NODE_RANK": "0", "NUM_GPUS_PER_NODE": "2"}
        sky = {f"SKYPILOT_{name}": value for name, value in given.items()}
        sky |= {"SKYPILOT_NODE_IPS": "127.0.0.1\n10.0.0.2", "RECIPE": str(recipe)}
        return ["bash", "-c", task["run"]], environment(path, **sky, RUN_DIR=str(run))
    job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    pod = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    line = shlex.join(pod["containers"][0]["command"])
    given = {"$(RANK)": "0", "$(MASTER_ADDR)": "127.0.0.1", "$(MASTER_PORT)": "29512"}
    given |= {"--nnodes=2": "--nnodes=1", "--nproc-per-node=8": "--nproc-per-node=2"}
    given |= {"/recipes/my.yaml": str(recipe), "/runs/my-run": str(run)}
    for old, new in given.items():
        assert old in line
        line = line.replace(old, new)
    return ["bash", "-c", line.replace("'", "")], environment(path)


@pytest.mark.cases(slow="skypilot")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "skypilot"])
def test_its_torchrun_line_runs_here(settings: dict[str, Any], tmp_path: Path, kind: str) -> None:
    run = tmp_path / "the run"
    recipe = write_recipe(tmp_path / "r.yaml", two_processes(settings))
    command, given = command_of(kind, tmp_path, recipe, run)
    if kind == "kubernetes":
        run = tmp_path / "run"
        command, given = command_of(kind, tmp_path, recipe, run)
    done = subprocess.run(
        command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "2 (DDP)" in done.stderr and len(rows(run, "step")) == 3


@pytest.mark.soak
def test_slurm_passes_the_signal_on_and_requeues(settings: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    values = two_processes(settings, training__max_steps=4000)
    recipe = write_recipe(tmp_path / "r.yaml", values)
    command, given = command_of("slurm", tmp_path, recipe, run)
    process = subprocess.Popen(command, cwd=ROOT, env=given, stderr=subprocess.PIPE, text=True)
    wait_for(process, run, 3)
    process.send_signal(signal.SIGUSR1)
    _, said = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, said
    assert "requeue 7" in (tmp_path / "bin" / "asked").read_text()
    taken = len(rows(run, "step"))
    assert (run / "checkpoints" / f"step-{taken:08d}" / "COMPLETE").is_file()
    assert not (run / "result.json").exists()


def wait_for(process: Any, run: Path, steps: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not (run / "metrics.jsonl").is_file() or len(rows(run, "step")) < steps:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def rank_process(number: int, run: Path) -> int:
    """The process of a rank that works in a run folder."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables = (path / "environ").read_bytes().split(b"\0")
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        is_ours = f"run_dir={run}".encode() in words and b"vlmpack" in words
        if is_ours and f"RANK={number}".encode() in variables:
            return int(path.name)
    raise AssertionError("there is no such rank")


@pytest.mark.soak
def test_a_killed_rank_is_started_again_with_all_others(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """The losses are those of a run that nothing happened to, bit for bit."""
    steps = 60
    values = two_processes(settings, training__max_steps=steps, checkpoint__interval_steps=4)
    values["checkpoint"]["keep"] = 2
    recipe = write_recipe(tmp_path / "r.yaml", values)

    def launch(run: Path) -> Any:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", "2", "--max-restarts", "1", "-m", "vlmpack", "finetune"]
        return subprocess.Popen(
            [*launcher, str(recipe), f"run_dir={run}"],
            cwd=ROOT,
            env=environment(tmp_path),
            stderr=subprocess.PIPE,
            text=True,
        )

    disturbed, calm = tmp_path / "disturbed", tmp_path / "calm"
    process = launch(disturbed)
    wait_for(process, disturbed, 10)
    os.kill(rank_process(1, disturbed), signal.SIGKILL)
    killed_at = len(rows(disturbed, "step"))
    _, said = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, said
    resumed = re.search(r"resumed from \S+ at step (\d+)", said)
    assert resumed is not None and 4 <= int(resumed[1]) <= killed_at + 1 < steps
    assert not (disturbed / "run.lock").exists() and (disturbed / "result.json").is_file()
    other = launch(calm)
    _, said = other.communicate(timeout=TIMEOUT)
    assert other.returncode == 0 and "resumed" not in said, said
    assert rows(disturbed, *EXACT) == rows(calm, *EXACT)
    assert len(rows(calm, "step")) == steps
