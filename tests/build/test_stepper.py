"""The stepper of a recipe: what layers draw has a seed, in adapters and in the model's own."""

from __future__ import annotations

import json

import pytest
import torch
from support.engines import make_engine
from support.families import tiny_family_folder
from support.shards import ROOT, read_shard

from vlmpack.build.objective import build_stepper, objective_spec
from vlmpack.encode import Encoder
from vlmpack.packing import pack_batch_sequences
from vlmpack.recipe import load_recipe


@pytest.mark.slow
def test_what_a_model_drops_is_drawn_by_the_recipes_seed(tmp_path):
    folder = tiny_family_folder("internvl", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["hidden_dropout_prob"] = 0.3
    (folder / "config.json").write_text(json.dumps(config))
    encoder = Encoder(folder)
    row = pack_batch_sequences(
        [encoder.encode(sample.cooked()) for sample in read_shard(limit=3)],
        pad_to_multiple_of=1,
        pad_token_id=encoder.pad_token_id,
    )

    def loss(seed, *, before):
        engine = make_engine(folder, encoder)
        recipe = load_recipe(ROOT / "recipes/digits-demo.yaml", {"training.seed": seed})
        stepper = build_stepper(objective_spec(recipe), engine, engine.ranks, total_steps=9)
        torch.manual_seed(before)
        sums, _ = stepper.train(0, [row], num_skipped=0, stop=False)
        return sums.loss

    assert loss(1, before=2) == loss(1, before=3)
    assert loss(1, before=2) != loss(4, before=2), "nothing was dropped"


def test_a_model_that_draws_nothing_has_no_seed(session_engine):
    recipe = load_recipe(ROOT / "recipes/digits-demo.yaml", {"training.seed": 1})
    engine = session_engine
    stepper = build_stepper(objective_spec(recipe), engine, engine.ranks, total_steps=9)
    assert stepper.dropout_seed is None
