"""Files of a run follow the umask, and nobody else may write them where there is none."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.recipes import small_settings, write_recipe
from support.shards import ROOT
from support.whole_runs import environment

from vlmpack.whole_file import not_world_writable


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.parametrize(
    ("given", "within"), [(0o000, 0o002), (0o022, 0o022), (0o077, 0o077), (0o005, 0o007)]
)
def test_the_umask_is_kept_but_for_other_users_writing(umask, given, within, tmp_path):
    os.umask(given)
    with not_world_writable():
        (tmp_path / "a").write_text("")
    (tmp_path / "b").write_text("")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"]
    assert modes == [0o666 & ~within, 0o666 & ~given]


def made_by(folder: Path, mask: int, *, asynchronous: bool) -> dict[str, int]:
    """Modes of all that a run leaves, its index, record, checkpoint, export and report included."""
    settings = small_settings(
        folder,
        data__num_workers=1,
        training__max_steps=2,
        logging__trackers=["tensorboard"],
        checkpoint__asynchronous=asynchronous,
    )
    given = set(folder.rglob("*"))
    recipe = write_recipe(folder / "recipe.json", settings)
    command = [sys.executable, "-m", "vlmpack", "finetune", str(recipe)]
    subprocess.run(command, cwd=ROOT, env=environment(), umask=mask, check=True)
    made = set(folder.rglob("*")) - given - {recipe}
    assert len(made) > 30, "guard: a run leaves more"
    return {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) for path in made}


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_under_no_umask_leaves_nothing_that_anybody_may_write(tmp_path, asynchronous):
    made = made_by(tmp_path, 0, asynchronous=asynchronous)
    assert {name: oct(mode) for name, mode in made.items() if mode & 0o002} == {}


@pytest.mark.slow
def test_a_run_keeps_to_a_narrower_umask(tmp_path):
    made = made_by(tmp_path, 0o077, asynchronous=True)
    assert {name: oct(mode) for name, mode in made.items() if mode & 0o077} == {}
