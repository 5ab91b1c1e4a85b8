"""The scripts of docs/examples that end with an answer, run from the built wheel.

In CI one of them, with the packages of this environment beneath; as soak tests all of them, in an
environment that pip has made of the wheel alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from package.test_wheel_and_sdist import built  # noqa: F401  (a fixture)

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, MODEL = ROOT / "docs/examples", ROOT / "assets/tiny-qwen2_5_vl"
SMALL = (
    *("model.dtype=float32", "training.micro_batch_size=4", "training.global_batch_size=16"),
    *("training.num_epochs=null", "training.max_steps=40", "training.seq_length=1024"),
    *("optim.warmup_steps=5", "optim.lr=0.0001", "data.num_workers=1"),
    *("evaluation.interval_steps=40", "evaluation.max_samples=32"),
)
"""What makes the recipe of a 3B model one that two cores train in seconds."""


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):  # noqa: F811
    """An environment with the wheel in it, and the folder of its commands. Other packages are those
    of this one, but not the checkout: files that put it on the path are not read from there."""
    home = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin/python"
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    zipfile.ZipFile(built[0]).extractall(site)
    (site / "beneath.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name, module in (("vlmpack", "vlmpack.__main__"), ("torchrun", "torch.distributed.run")):
        command = home / "bin" / name
        guard = "if __name__ == '__main__':"  # loaders import it again
        command.write_text(f"#!{python}\nfrom {module} import main\n{guard}\n    main()\n")
        command.chmod(0o755)
    return home / "bin"


@pytest.fixture(scope="module")
def by_pip(built, tmp_path_factory):  # noqa: F811
    """The folder of commands of an environment in which pip has installed the wheel, with what it
    asks for itself, the extras that a script names, and nothing else."""
    home = tmp_path_factory.mktemp("pip") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    pip = [str(home / "bin/python"), "-m", "pip", "install", "--quiet"]
    (extras,) = re.findall(
        r"pip install 'vlmpack(\[.+\])'", (EXAMPLES / "eight_gpus.sh").read_text()
    )
    wanted = ["-c", str(ROOT / "constraints.txt"), f"{built[0]}{extras}"]
    done = subprocess.run([*pip, *wanted], capture_output=True, text=True, check=False)
    if done.returncode and "Could not find a version" not in done.stderr:
        pytest.skip(f"pip could not install: {done.stderr[-500:]}")
    assert done.returncode == 0, done.stderr
    return home / "bin"


def run(installed: Path, *command: str, **variables: str) -> str:
    """A script in that environment, away from the checkout; what it said."""
    environment = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    environment |= {"PATH": f"{installed}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    where = [str(installed / "python"), "-c", "import vlmpack; print(vlmpack.__file__)"]
    told = {"cwd": installed.parent, "env": environment | variables, "text": True}
    found = subprocess.run(where, check=True, capture_output=True, **told).stdout
    assert Path(found.strip()).is_relative_to(installed.parent), (
        "the checkout is tried, not the wheel"
    )
    done = subprocess.run(command, capture_output=True, timeout=500, **told)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("home", ["installed", "by_pip"])
def test_a_folder_of_images_becomes_a_model_that_answers(home, request, tmp_path):
    installed = request.getfixturevalue(home)
    script = str(EXAMPLES / "folder_of_images.sh")
    said = run(installed, "bash", script, str(MODEL), str(tmp_path), STEPS="100")
    table = (tmp_path / "photos/test.csv").read_text().splitlines()
    assert (tmp_path / "answer.txt").read_text().strip() == table[1].split(",")[2]
    assert "packed equals unpacked" in said and "exact match  0.0% -> " in said


WHEN_IT_TRAINS = """#!/usr/bin/env bash
# timeout --signal TERM SECONDS COMMAND: a machine may need any time until it trains.
shift 3
"$@" &
trained() { [ "$(grep -c '"loss"' "$METRICS" || true)" -ge 5 ]; }
until trained || ! kill -0 $!; do sleep 0.2; done 2>/dev/null
kill -TERM $!
wait $!
exit 124
"""


@pytest.mark.soak
@pytest.mark.megatron
def test_the_lines_for_eight_gpus_train_on_two_processes_and_go_on(by_pip, tmp_path):
    digits = str(ROOT / "assets/digits")
    shards = (f"{digits}/train-*.tar", f"{digits}/val-*.tar")
    script = str(EXAMPLES / "eight_gpus.sh")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/timeout").write_text(WHEN_IT_TRAINS)
    (tmp_path / "bin/timeout").chmod(0o755)
    said = run(
        by_pip,
        *("bash", script, str(MODEL), *shards, str(tmp_path), *SMALL),
        PATH=f"{tmp_path / 'bin'}:{by_pip}:{os.environ['PATH']}",
        METRICS=str(tmp_path / "run/metrics.jsonl"),
        GPUS="2",
        STOP_AFTER="1",
        IMAGE=str(ROOT / "docs/images/digits.jpg"),
        QUESTION="Read the digits.",
    )
    assert "stopped: the same command goes on" in said and "resumed from" in said
    assert "proven: 40 global batches in 2 launches" in said
    assert (tmp_path / "answer.txt").read_text().strip().isdigit()


@pytest.mark.soak
def test_research_on_a_laptop_ends_with_two_runs_compared_and_an_answer(by_pip, tmp_path):
    python, script = str(by_pip / "python"), str(EXAMPLES / "own_research.py")
    said = run(by_pip, python, script, str(MODEL), str(tmp_path), "100")
    assert (tmp_path / "answer.txt").read_text().strip() in {"red", "green", "blue"}
    assert "packing.mode" in said, "what differs between the runs"


def test_a_launch_that_fails_is_none_that_was_stopped(tmp_path):
    """Stand-ins: `vlmpack` does nothing, `torchrun` fails."""
    for name, code in (("vlmpack", 0), ("torchrun", 9)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    given = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "STOP_AFTER": "60"}
    command = ["bash", str(EXAMPLES / "eight_gpus.sh"), "m", "t", "v", str(tmp_path / "work")]
    done = subprocess.run(command, capture_output=True, text=True, env=given, check=False)
    assert done.returncode == 9 and "stopped" not in done.stdout
