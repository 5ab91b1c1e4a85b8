"""What all processes of a launch refuse alike is said once, and what one of them has always."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.forked import run_ranks
from support.recipes import run_settings, write_recipe

from vlmpack.activity import ACTIVITY
from vlmpack.cli import app
from vlmpack.cli.app import FRESH_SECONDS, rank_that_said
from vlmpack.errors import Preempted, VlmpackError


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def test_the_first_says_it_and_the_others_point_at_it() -> None:
    assert rank_that_said("no such folder", 2) is None
    assert [rank_that_said("no such folder", rank) for rank in (0, 1, 3)] == ["2", "2", "2"]
    assert rank_that_said("no such folder, on node-7", 1) is None, "its own fault"
    assert rank_that_said("no such folder", 2) is None, "started by hand once more"


def test_another_launch_says_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_that_said("bad", 0) is None and rank_that_said("bad", 1) == "0"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert rank_that_said("bad", 1) is None and rank_that_said("bad", 0) == "1"
    monkeypatch.setattr(os, "getppid", lambda: 4711)
    assert rank_that_said("bad", 0) is None


def test_what_was_said_long_ago_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_that_said("bad", 0) is None
    (file,) = app._own_folder().iterdir()
    old = file.stat().st_mtime - FRESH_SECONDS - 1
    os.utime(file, (old, old))
    assert rank_that_said("bad", 1) is None and rank_that_said("bad", 0) == "1"


def test_where_nothing_can_be_kept_everybody_speaks(tmp_path: Path) -> None:
    folder = tmp_path / "tmp" / f"vlmpack-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert [rank_that_said("bad", rank) for rank in (0, 1)] == [None, None]
    folder.chmod(0o755)
    assert [rank_that_said("bad", rank) for rank in (0, 1)] == [None, "0"]
    tempfile.tempdir = str(tmp_path / "nowhere")
    assert [rank_that_said("bad", rank) for rank in (0, 1)] == [None, None]


def test_what_happens_in_a_run_is_said_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(error: VlmpackError) -> list[str]:
        found = []
        for rank in "01":
            monkeypatch.setenv("RANK", rank)
            found.append(app._in_one_voice(error))
        return found

    error = Preempted("stopped at step 3")
    assert said(error) == ["stopped at step 3"] * 2, "one process"
    assert said(VlmpackError("bad"))[0] == "error: bad", "a clean stop is no error"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ACTIVITY, "step", 3)
    assert said(error) == [f"[rank {rank}] stopped at step 3" for rank in (0, 1)]
    monkeypatch.setattr(ACTIVITY, "step", 0)
    assert said(error) == [
        "[rank 0] stopped at step 3",
        "[rank 1] the same as rank 0 has",
    ]


def refused(recipe: Path, environment: dict[str, str]) -> Sequence[str]:
    done: Any = run_ranks(
        ["-m", "vlmpack", "finetune", recipe], 2, timeout=120, environment=environment
    )
    assert set(done.codes) <= {2, -15}, done.stderr  # a launcher ends those behind the first
    return done.stderr.splitlines()


@pytest.mark.slow
def test_ranks_refuse_a_recipe_once(tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path / "bad.yaml",
        run_settings(tmp_path, training__micro_batch_size=4, training__global_batch_size=4),
    )
    lines = refused(recipe, {**os.environ, "TMPDIR": str(tmp_path / "tmp")})
    assert sum("global_batch_size: 4 is not a multiple" in line for line in lines) == 1, lines
