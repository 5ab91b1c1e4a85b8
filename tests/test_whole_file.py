"""What somebody named is opened where it is a regular file, and never waited for elsewhere."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.shards import ROOT, TINY_MODEL

from vlmpack.capabilities.folder import read_config
from vlmpack.data.files.images import ImageRoot
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.errors import DataError, ModelError, RecipeError, VlmpackError
from vlmpack.recipe import load_recipe
from vlmpack.storage.fetch import LocalFetcher, ShardStamp
from vlmpack.whole_file import open_regular, regular_bytes, regular_text

WAITS = 20
"""Seconds after which a test that waits for a pipe is ended."""
PACKAGE = ROOT / "vlmpack"
ELSEWHERE = {
    "capabilities/refused.py": "files of transformers and of this package",
    "cli/families.py": "a page of this project",
    "cli/app.py": "a file that was just made",
    "cli/options.py": "a file of this package",
    "data/loading/workers.py": "/proc",
    "distributed/pulse.py": "/proc",
    "proof/verify/memory.py": "/proc",
    "report/document.py": "a file of this package",
    "run/launch_memory.py": "/proc",
    "training/run_lock.py": "/proc",
}
"""Modules that read a file by other means, which nobody names."""


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A pipe that nobody writes to."""
    path = tmp_path / "config.json"
    os.mkfifo(path)
    return path


DOORS: dict[str, Callable[[Path], object]] = {
    "open_regular": open_regular,
    "regular_bytes": regular_bytes,
    "regular_text": regular_text,
    "head": lambda path: LocalFetcher().head(str(path)),
    "open": lambda path: LocalFetcher().open(ShardStamp(str(path), 1, "")),
    "read": lambda path: LocalFetcher().read(ShardStamp(str(path), 1, ""), 0, 1),
    "an image": lambda path: ImageRoot(str(path.parent), SampleCaps()).load(path.name),
    "a recipe": load_recipe,
    "a model folder": lambda path: read_config(path.parent),
}


@pytest.mark.timeout(WAITS)
@pytest.mark.parametrize("door", DOORS)
def test_a_pipe_is_refused_at_once(pipe: Path, door: str) -> None:
    with pytest.raises((OSError, VlmpackError)) as error:
        DOORS[door](pipe)
    assert isinstance(error.value, OSError | DataError | RecipeError | ModelError)
    assert "regular file" in str(error.value) or "seek" in str(error.value)


@pytest.mark.timeout(WAITS)
def test_a_pipe_beside_the_files_of_a_model_is_refused(tmp_path: Path) -> None:
    for path in TINY_MODEL.iterdir():
        (tmp_path / path.name).symlink_to(path)
    assert read_config(tmp_path)
    os.mkfifo(tmp_path / "tokenizer_config.json.part")
    with pytest.raises(ModelError, match=r"config.json.part is no regular file"):
        read_config(tmp_path)


def test_a_regular_file_is_read_as_path_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes("ä\r\nb\n".encode())
    assert regular_bytes(path) == path.read_bytes()
    assert regular_text(path) == path.read_text(encoding="utf-8")
    with open_regular(path) as file:
        assert file.readline() == "ä\r\n".encode()
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "b")


def test_no_module_opens_a_named_file_by_other_means() -> None:
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(word in text for word in ("read_text", "read_bytes", ".open(")):
            continue
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                mode = (
                    call.args[0].value
                    if call.args and isinstance(call.args[0], ast.Constant)
                    else ""
                )
                reads = call.func.attr in ("read_text", "read_bytes")
                if reads or (call.func.attr == "open" and mode == "rb"):
                    found.add(str(path.relative_to(PACKAGE)))
    assert found == {*ELSEWHERE}, "vlmpack.whole_file has open_regular"
