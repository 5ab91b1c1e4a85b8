"""`make docs` builds the site where no link leads nowhere, and files of the repository go along."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MKDOCS = ROOT / ".docs/bin/mkdocs"
needs_mkdocs = pytest.mark.skipif(not MKDOCS.exists(), reason="make docs has not been run")


def hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "tools/site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """What the Makefile's own line says of a copy of the pages."""
    (line,) = re.findall(r"^\t.*(mkdocs build.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = [str(MKDOCS), *line.split()[1:], "--site-dir", str(folder / "site")]
    given = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=folder, env=given, capture_output=True, text=True, check=False
    )


@needs_mkdocs
@pytest.mark.slow
def test_the_site_is_built_and_a_link_that_leads_nowhere_fails(tmp_path):
    for name in ("docs", "tools", "recipes", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/guides/own-data.html").is_file()
    assert (tmp_path / "site/source/recipes/digits-demo.yaml.txt").is_file()
    for wrong in ("[a](nowhere.md)", "[a](packing.md#nowhere)", "[a](../recipes/nowhere.yaml)"):
        page = tmp_path / "docs/index.md"
        page.write_text(f"{(ROOT / 'docs/index.md').read_text()}\n{wrong}\n")
        assert build(tmp_path).returncode != 0, wrong


def test_a_link_out_of_docs_leads_to_the_file_that_goes_along():
    outside = hooks().outside
    assert outside("gpu.md", "../recipes/a.yaml") == "recipes/a.yaml"
    assert outside("guides/lora.md", "../../README.md") == "README.md"
    assert outside("guides/lora.md", "../data.md") is None
