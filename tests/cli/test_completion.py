"""`vlmpack --install-completion`, in the shell that completes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

INSTALL = "{0} --install-completion; echo ended $?"

COMPLETE = """
source ~/.bashrc
complete -p vlmpack || exit
COMP_WORDS=({0}); COMP_CWORD={1}
_vlmpack_completion vlmpack
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def bash(home: Path, script: str) -> str:
    """What a shell without settings of its own prints."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    ended = subprocess.run(
        ["bash", "--noprofile", "--norc", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={"HOME": str(home), "PATH": path},
    )
    return ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("program", ["vlmpack", "python -m vlmpack"])
def test_bash_completes_commands_and_options(tmp_path: Path, program: str) -> None:
    (tmp_path / ".bashrc").write_text("export KEPT=1\n")
    assert "no completion specification" in bash(tmp_path, COMPLETE.format("vlmpack", 1))
    installed = bash(tmp_path, INSTALL.format(program))
    assert "bash completion installed in" in installed and "ended 0" in installed
    assert (tmp_path / ".bashrc").read_text().startswith("export KEPT=1\n")
    assert [path.name for path in (tmp_path / ".bash_completions").iterdir()] == ["vlmpack.sh"]
    found = bash(tmp_path, COMPLETE.format("vlmpack fi", 1)).splitlines()
    assert found[-1] == "finetune"
    found = bash(tmp_path, COMPLETE.format("vlmpack data s", 2)).splitlines()
    assert found[-2:] == ["stats", "show"]
    found = bash(tmp_path, COMPLETE.format("vlmpack plan --wor", 2)).splitlines()
    assert found[-1] == "--world-size"
    found = bash(tmp_path, COMPLETE.format("vlmpack finetune rec", 2)).splitlines()
    assert found[1:] == [""], "a file is bash's own to complete"
