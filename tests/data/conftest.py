"""A small split, and windows small enough that its epochs have several."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.shard_fakes import COUNT, small_windows, write_shards

__all__ = ["few_rows", "folder", "small_windows"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """COUNT numbered samples in shards of 7, the last of 5; read-only."""
    folder = tmp_path_factory.mktemp("data")
    write_shards(folder, COUNT, per_shard=7)
    return folder


@pytest.fixture
def few_rows(small_windows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of about two global batches of planned rows, too."""
    monkeypatch.setattr("vlmpack.data.plan.packers.BATCHES_PER_WINDOW", 2)
    monkeypatch.setattr("vlmpack.data.plan.packs.BATCHES_PER_WINDOW", 2)
