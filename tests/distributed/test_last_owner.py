"""A process group whose threads are still at work when a run ends.

Run in ranks: a run under DDP, whose last collective is still in a thread of gloo's, in Python.

    test_last_owner.py RECIPE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.forked import run_ranks
from support.recipes import run_settings, write_recipe

import vlmpack

SECONDS = 3.0


@pytest.mark.slow
def test_a_run_ends_while_a_thread_of_its_group_wants_python(tmp_path: Path) -> None:
    """It hung for ever where DDP's reducer, in C++, owned the group last: it waited for the thread
    with the interpreter's lock."""
    values = run_settings(tmp_path, training__micro_batch_size=2, training__max_steps=1)
    recipe = write_recipe(tmp_path / "recipe.json", values)
    done = run_ranks([Path(__file__), recipe], 2, timeout=100)
    assert done.codes == [0, 0], done.stderr[-3000:]
    assert done.stdout.split() == ["begins", "ends", "begins", "ends"]


def train_and_linger(recipe: str) -> None:
    destroy = dist.destroy_process_group

    def slow(_: object) -> torch.Tensor:
        print("begins", flush=True)
        time.sleep(SECONDS)
        print("ends", flush=True)
        return torch.ones(1)

    def with_a_thread_at_work() -> None:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        work.get_future().then(slow)
        time.sleep(SECONDS / 10)
        begun = time.monotonic()
        destroy()
        assert time.monotonic() - begun < SECONDS / 2, "guard: nothing was left to wait for"

    dist.destroy_process_group = with_a_thread_at_work
    vlmpack.finetune(recipe)


if __name__ == "__main__":
    train_and_linger(sys.argv[1])
