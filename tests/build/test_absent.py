"""What of a recipe's data this disk has not."""

from __future__ import annotations

from pathlib import Path

from support.recipes import run_settings

from vlmpack.api import resolve
from vlmpack.build.absent import absent_sources


def test_each_split_has_its_line(tmp_path: Path) -> None:
    recipe = resolve(run_settings(tmp_path), {})
    assert absent_sources(recipe) == []
    gone = {"data__train": f"{tmp_path}/no.tar", "data__validation": f"{tmp_path}/none-*.tar"}
    train, validation = absent_sources(resolve(run_settings(tmp_path, **gone), {}))
    assert train.startswith(f"data.train: '{tmp_path}/no.tar' matches no file")
    assert validation.startswith(f"data.validation: '{tmp_path}/none-*.tar' matches no file")
