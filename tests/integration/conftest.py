"""A small copy of the digits, and recipes that train on it in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.recipes import changed, run_settings


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """A recipe as a mapping: everything local, no workers."""
    return run_settings(tmp_path)


@pytest.fixture
def shard(settings: dict[str, Any]) -> Path:
    """Its 22 training samples with 0 to 3 images, in a place of their own."""
    return Path(settings["data"]["train"])


@pytest.fixture
def online(settings: dict[str, Any]) -> dict[str, Any]:
    """Rows of up to 256 tokens, two a step, one epoch."""
    return changed(
        settings,
        packing__mode="online",
        training__seq_length=256,
        training__micro_batch_size=1,
        training__global_batch_size=2,
        training__max_steps=None,
        training__num_epochs=1,
    )
