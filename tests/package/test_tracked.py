"""What the repository tracks is its own: nothing that a make target installs or a run writes."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from support.shards import ROOT


def listed(*options: str) -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", *options], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="no git checkout"
)
def test_nothing_that_is_ignored_is_tracked() -> None:
    assert len(listed()) > 500, "vacuous"
    assert listed("--cached", "--ignored", "--exclude-standard") == []
