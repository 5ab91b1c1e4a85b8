"""What a run's ranks are evened out by, where the model folder says its sizes and where not."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recipes import SMALL, changed, copy_samples
from support.shards import ROOT, TINY_MODEL

from vlmpack.build.data import build_encoder, data_spec, open_split
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.rank_bins import token_cost
from vlmpack.distributed import Ranks
from vlmpack.packing.balance import CostModel
from vlmpack.recipe import load_recipe


class TwoReplicas(Ranks):
    """One of two, without the other: what one rank finds stands."""

    def on_main(self, job: Any) -> Any:
        return job()


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    copy_samples(ROOT / "assets/digits/train-000000.tar", tmp_path / "train.tar", SMALL)
    shutil.copytree(TINY_MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    path = str(tmp_path / "train.tar")
    return {
        "model": {"path": str(tmp_path / "model")},
        "data": {
            "train": path,
            "validation": path,
            "num_workers": 0,
            "index_dir": str(tmp_path / "index"),
        },
        "training": {
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "seq_length": 512,
            "max_steps": 3,
        },
        "optim": {"lr": 1e-4},
        "run_dir": str(tmp_path / "run"),
    }


def opened(settings: dict[str, Any], key: str = "data.train", *, rank: int = 0) -> TrainData:
    recipe = load_recipe(settings)
    ranks = TwoReplicas(
        rank=rank,
        world_size=2,
        dp_rank=rank,
        dp_size=2,
        device=torch.device("cpu"),
    )
    data = data_spec(recipe, build_encoder(recipe), ranks)
    train = open_split(data, key, Ledger(None))
    assert train is not None
    return train


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def without_a_size(settings: dict[str, Any]) -> None:
    """Transformers has a default for it, so such a folder trains."""
    path = Path(settings["model"]["path"]) / "config.json"
    config = json.loads(path.read_text())
    assert config["text_config"].pop("intermediate_size")
    path.write_text(json.dumps(config))


def test_a_size_that_is_left_out_ends_no_run(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    known = opened(settings)
    assert isinstance(known.config.row_cost, CostModel) and warnings(caplog) == []
    without_a_size(settings)
    train = opened(settings)
    opened(settings, "data.validation")
    opened(settings, rank=1)
    assert train.config.row_cost is token_cost
    (line,) = warnings(caplog)
    assert "packing.balance: cost counts tokens alone" in line and "intermediate_size" in line
    first = next(train.planned(train.start(), 1)).bins
    shares = train.rank_bins(first, 2)
    assert sorted(b for rank in shares.bins for b in rank) == sorted(first)


def test_bins_in_turn_need_no_cost(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    without_a_size(settings)
    assert opened(changed(settings, packing__balance="none")).config.row_cost is token_cost
    assert warnings(caplog) == []
