"""The dry run of a plan is that of the run: the same samples, grouped and sharing as there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forecast.test_run_plan import recipe_for
from support.plans import plan_inputs
from support.shard_fakes import chat_json, config_for, image_bytes, write_shard
from support.shards import TINY_MODEL

from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.batches import dry_run_order
from vlmpack.encode import Encoder
from vlmpack.forecast import make
from vlmpack.forecast.figures import RunPlan
from vlmpack.forecast.make import plan_figures
from vlmpack.packing.budget import RowBudget

PICTURES, QUESTIONS = 8, 12


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Questions about pictures, those of one picture far apart."""
    folder = tmp_path_factory.mktemp("dry")
    records = []
    for question in range(QUESTIONS):
        for picture in range(PICTURES):
            fields = {
                "json": chat_json(f"what {question}", f"a {picture}", 1),
                "0.png": image_bytes(168, 168, seed=picture),
            }
            records.append((f"q{picture}-{question}", fields))
    write_shard(folder / "s-0.tar", records)
    return str(folder / "s-*.tar"), folder / "index"


def opened(shards: tuple[str, Path], encoder: Encoder, mode: str, **changes: Any) -> TrainData:
    settings: dict[str, Any] = {
        "shuffle": "global",
        "group_by": "image",
        "mode": mode,
        "scope": "stream",
        "micro_batch_size": 1 if mode == "online" else 4,
        "global_batch_size": 4,
        "seq_length": 320,
        "budget": RowBudget(max_tokens=320),
    }
    return TrainData.open(config_for(*shards, **(settings | changes)), encoder)


def plan_of(data: TrainData) -> RunPlan:
    inputs = plan_inputs(recipe_for("in_batch"), config=data.config, split=data.split)
    return plan_figures(inputs)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [True, False])
def test_rows_that_the_recipe_does_not_have_are_settled_as_its_run_would(
    shards: tuple[str, Path], shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Encoder(TINY_MODEL).replace(share_prefix=True) if shares else Encoder(TINY_MODEL)
    online, other = (opened(shards, encoder, mode) for mode in ("online", "in_batch"))
    found = {}
    for name, data in (("run", online), ("plan", other)):
        [found[name]] = [each for each in plan_of(data).modes if each.name == "online, stream"]
    most = online.identity["packing.max_sequences"]
    assert most == (16 if shares else 8)
    assert found["plan"].rows == found["run"].rows
    assert found["plan"].slots == found["run"].slots
    if shares:  # rows of the same samples alone hold fewer, and that bound cuts groups
        monkeypatch.setattr(make, "planned_of", lambda split: None)
        [wrong] = [each for each in plan_of(other).modes if each.name == "online, stream"]
        assert wrong.rows > found["run"].rows


def test_the_first_samples_are_in_the_order_of_their_groups(
    shards: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = opened(shards, Encoder(TINY_MODEL), "in_batch")
    tried = []

    def order(*arguments: Any) -> Any:
        tried.append(dry_run_order(*arguments))
        return tried[-1]

    monkeypatch.setattr(make, "dry_run_order", order)
    assert plan_of(data).sequences.dry_run_samples == PICTURES * QUESTIONS
    [numbers] = tried
    pictures = [data.fitted.table.key(number)[1] for number in numbers.tolist()]
    assert len(pictures) == PICTURES * QUESTIONS
    assert np.sum(np.asarray(pictures[1:]) != np.asarray(pictures[:-1])) == PICTURES - 1
