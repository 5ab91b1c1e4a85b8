"""Ranks that are forked from a server are what ranks that torchrun starts would be."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.forked import RankServer, check_ranks, run_ranks
from support.shards import ROOT

NUMBERS = """
import random, sys
import numpy, torch
from support.layouts import LAYOUTS, stepper_with, train
from support.engines import make_engine
from support.shards import TINY_MODEL
from vlmpack.encode import Encoder

torch.manual_seed(3)
print(torch.get_num_threads(), torch.rand(3).tolist(), sys.flags, flush=True)
engine = make_engine(TINY_MODEL, Encoder(TINY_MODEL))
for loss, norm in train(stepper_with(engine, "adamw"), LAYOUTS["one"], 2):
    print(loss.hex(), norm.hex())
print(sum(p.double().abs().sum() for _, p in engine.parameters()).item().hex())
"""

RANKS = """
import os, sys, signal, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
mine = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(mine)
print(os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], mine.item(),
      os.environ.get("OF_THE_TEST"), os.getcwd(), sys.argv[1:], sys.stdin.read(), __name__)
dist.destroy_process_group()
if sys.argv[1:] == ["fail"] and os.environ["RANK"] == "1":
    sys.exit("rank 1 cannot go on")
if sys.argv[1:]:
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.soak
def test_a_forked_process_computes_what_a_fresh_one_does(tmp_path: Path) -> None:
    """Twice, for the first must not have changed the server."""
    path = script(tmp_path, NUMBERS)
    fresh = subprocess.run(
        [sys.executable, str(path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "tests"), str(ROOT)))},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert len(fresh.stdout.splitlines()) == 4
    for _ in range(2):
        done = run_ranks([path], 1, timeout=120)
        assert (done.returncode, done.stdout) == (0, fresh.stdout), done.stderr


@pytest.mark.soak
def test_each_rank_has_its_own_surroundings(tmp_path: Path) -> None:
    environment = os.environ | {"OF_THE_TEST": "yes"}
    done = run_ranks([script(tmp_path, RANKS)], 2, timeout=60, environment=environment)
    assert done.returncode == 0, done.stderr
    for rank, line in enumerate(done.stdout.splitlines()):
        assert line == f"{rank} {rank} 2 3.0 yes {ROOT} []  __main__"
    assert len(done.stdout.splitlines()) == 2
    alone = script(tmp_path, "import os; print(*os.environ)")
    assert run_ranks([alone], 1, timeout=60, environment={"A": "1"}).stdout == "A\n"


@pytest.mark.slow
def test_no_rank_draws_what_another_drew(tmp_path: Path) -> None:
    draws = "random.random(), numpy.random.rand(), torch.rand(()).item()"
    path = script(tmp_path, f"import random, numpy, torch; print({draws})")
    drawn = [run_ranks([path], 2, timeout=60).stdout.split() for _ in range(2)]
    assert len({number for numbers in drawn for number in numbers}) == 12


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others_and_says_why(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 1 ended with 1:\s+rank 1 cannot go on\s*$"):
        check_ranks([script(tmp_path, RANKS), "fail"], 2, timeout=60)
    assert time.monotonic() - start < 50


@pytest.mark.soak
def test_ranks_that_hang_are_killed_all(tmp_path: Path) -> None:
    path = script(tmp_path, RANKS)
    done = run_ranks([path, "hang"], 2, timeout=6)
    assert done.returncode == -9
    assert "killed after 6 seconds" in done.stderr
    assert all(f'rank {rank} was in:\n  File "{path}"' in done.stderr for rank in range(2))
    pids = [int(line) for line in done.stdout.splitlines() if line.isdigit()]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.soak
def test_the_command_line_is_run_as_a_module() -> None:
    done = run_ranks(["-m", "vlmpack", "no-such-command"], 1, timeout=60)
    assert done.returncode == 2
    assert "No such command 'no-such-command'" in done.stderr


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
@pytest.mark.soak
def test_a_server_with_a_second_thread_is_not_forked(tmp_path: Path) -> None:
    """torch's and numpy's pools are such threads; a fork would lose them and keep their locks."""
    waits = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "computes.py").write_text(waits)
    server = RankServer((), path=[tmp_path])
    other = RankServer(("computes",), path=[tmp_path])
    path = script(tmp_path, "print('here')")
    try:
        assert run_ranks([path], 1, timeout=60, server=server).stdout == "here\n"
        with pytest.raises(AssertionError, match="the server has 2 threads"):
            run_ranks([path], 1, timeout=60, server=other)
    finally:
        server.close()
        other.close()
