"""A small copy of the digits, and a recipe that trains on it in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.recipes import SMALL, copy_samples
from support.shards import ROOT, TINY_MODEL


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """22 training samples with 0 to 3 images, in a place of their own."""
    path = tmp_path / "train-000000.tar"
    copy_samples(ROOT / "assets/digits/train-000000.tar", path, SMALL)
    return path


@pytest.fixture
def settings(tmp_path: Path, shard: Path) -> dict[str, Any]:
    """A recipe as a mapping: 4 samples a step, everything local, no workers."""
    return {
        "model": {"path": str(TINY_MODEL)},
        "data": {
            "train": str(shard),
            "num_workers": 0,
            "index_dir": str(tmp_path / "index"),
        },
        "packing": {"mode": "in_batch"},
        "training": {
            "micro_batch_size": 4,
            "global_batch_size": 4,
            "seq_length": 512,
            "max_steps": 3,
            "seed": 3,
        },
        "optim": {"lr": 2e-4, "warmup_steps": 2},
        "checkpoint": {"keep": 100},
        "logging": {"trackers": [], "progress": "none"},
        "export": {"enabled": False},
        "run_dir": str(tmp_path / "run"),
    }
