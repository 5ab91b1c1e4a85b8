"""A recipe to look at: 22 samples, one of them hostile, and a model folder without weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.recipes import SMALL, copy_samples, rewrite, write_recipe
from support.shards import ROOT, TINY_MODEL

HOSTILE = '<script>alert("x")</script> \u202e & \x01'
HOSTILE_KEY = "train00003"


def make_settings(root: Path, **values: Any) -> dict[str, Any]:
    """The recipe of `packing.mode: online` with rows of about six samples."""
    shard = root / "train-000000.tar"
    copy_samples(ROOT / "assets/digits/train-000000.tar", shard, SMALL)
    rewrite(shard, _hostile)
    model = root / "model"
    shutil.copytree(TINY_MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    return {
        "model": {"path": str(model)},
        "data": {"train": str(shard), "num_workers": 0, "index_dir": str(root / "index")},
        "packing": {"mode": "online", "max_tokens": 560},
        "training": {
            "micro_batch_size": 1,
            "global_batch_size": 2,
            "seq_length": 512,
            "max_steps": 3,
        },
        "optim": {"lr": 1e-4},
        "run_dir": str(root / "run"),
        **values,
    }


def _hostile(name: str, data: bytes) -> bytes:
    """The first question of one sample begins with markup."""
    if name != f"{HOSTILE_KEY}.json":
        return data
    document = json.loads(data)
    for part in document["messages"][0]["content"]:
        if part["type"] == "text":
            part["text"] = HOSTILE + part["text"]
            return json.dumps(document).encode()
    raise AssertionError("no text")


@pytest.fixture(scope="session")
def inspect_settings(tmp_path_factory: Any) -> dict[str, Any]:
    """A recipe in mode `online`."""
    return make_settings(tmp_path_factory.mktemp("inspect"))


@pytest.fixture(scope="session")
def inspect_recipe(inspect_settings: dict[str, Any]) -> Path:
    """The same as a file."""
    return write_recipe(Path(inspect_settings["run_dir"]).parent / "recipe.json", inspect_settings)


@pytest.fixture(scope="session")
def opened_row(inspect_recipe: Path) -> Any:
    """(row, bin, encoder) of the row with the hostile sample, over two context-parallel ranks."""
    from vlmpack.proof.rows.opening import Wanted, open_row

    return open_row(inspect_recipe, Wanted(key=HOSTILE_KEY), context=2)
