"""The wheel has the recipes, the sdist everything that is tested."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_BY_RUNS = {"runs", "packs", "inspect", "build", "dist"}
BUILD = """
import sys
from setuptools import build_meta
print(build_meta.build_wheel("out"), build_meta.build_sdist("out"), file=sys.stderr)
"""

pytestmark = pytest.mark.slow


def not_carried(folder, names):
    """What git ignores, so that a build here is that of a clone."""
    here = LEFT_BY_RUNS if Path(folder) == ROOT else set()
    return {
        n for n in names if n[0] == "." or n in here or n.endswith((".egg-info", "__pycache__"))
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist, of a copy, by setuptools alone: nothing is downloaded."""
    source = tmp_path_factory.mktemp("build") / "source"
    shutil.copytree(ROOT, source, ignore=not_carried)
    command = [sys.executable, "-W", "ignore", "-c", BUILD]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = (source / "out").glob("*.whl"), (source / "out").glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_has_every_file_and_recipe_once_and_nothing_else(built):
    names = zipfile.ZipFile(built[0]).namelist()
    assert len(names) == len(set(names))
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "vlmpack").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    recipes = {f"vlmpack/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    assert len(files) > 100 and len(recipes) > 10
    ours = {name for name in names if ".dist-info/" not in name}
    assert ours == files | recipes
    assert list((ROOT / "tools").rglob("*.py")) and not [n for n in ours if n.startswith("tools/")]
    licenses = {name.rpartition("/")[2] for name in names if "/licenses/" in name}
    assert licenses == {"LICENSE", "NOTICE"}


def test_the_sdist_has_what_a_clone_has(built):
    with tarfile.open(built[1]) as archive:
        files = {name.partition("/")[2] for name in archive.getnames() if not name.endswith("/")}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for folder in ("vlmpack", "docs", "tests", "recipes", "assets", "benchmarks", "tools")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert len(wanted) > 500
    alone = "README.md CHANGELOG.md CONTRIBUTING.md LICENSE NOTICE Makefile mkdocs.yml setup.py"
    assert wanted | {*alone.split(), "constraints.txt"} <= files
    assert not [name for name in files if name.endswith(".pyc")]


def test_a_recipe_of_the_installed_wheel_is_written_and_says_what_is_not_there(built, tmp_path):
    site, here = tmp_path / "site", tmp_path / "here"
    zipfile.ZipFile(built[0]).extractall(site)
    here.mkdir()
    program = "import vlmpack.cli as c, sys; print(c.__file__, file=sys.stderr); c.main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "recipe", "new", "digits-demo"],
        cwd=here,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr.startswith(str(site)), "another vlmpack was imported"
    assert (here / "digits-demo.yaml").read_text() == (
        ROOT / "recipes/digits-demo.yaml"
    ).read_text()
    assert "assets/tiny-qwen2_5_vl (model.path)" in done.stdout
