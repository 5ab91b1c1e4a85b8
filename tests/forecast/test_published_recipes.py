"""The recipes for models of published sizes: checked, planned, and in README's table."""

from __future__ import annotations

import json
import re

import pytest
import torch
from support.published_recipes import PUBLISHED, placed, published_model
from support.shards import ROOT
from typer.testing import CliRunner

from vlmpack.build.data import build_encoder
from vlmpack.build.policy import policy_of
from vlmpack.cli.app import app
from vlmpack.forecast.activations import forms_on
from vlmpack.forecast.memory import LargestMicroBatch, memory_figures
from vlmpack.forecast.parameters import read_sizes
from vlmpack.forecast.trained import trained_sizes
from vlmpack.recipe import load_recipe

GIB = 1 << 30


def said(*arguments):
    found = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert found.exit_code == 0, (found.output, found.exception)
    return found.output


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """A recipe's published model."""
    made = {}

    def folder(name):
        entry = PUBLISHED[name]
        if entry.model not in made:
            made[entry.model] = published_model(entry, tmp_path_factory.mktemp("m") / "model")
        return made[entry.model]

    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_checked_and_planned(tmp_path, model_of, name):
    entry, recipe = PUBLISHED[name], ROOT / f"recipes/{name}.yaml"
    given = placed(entry, model_of(name), tmp_path)
    world = ("--world-size", entry.processes)
    assert "OK" in said("recipe", "check", recipe, *given, *world)
    plan = tmp_path / "plan.json"
    said("plan", recipe, *given, *world, "--json", plan)
    content = json.loads(plan.read_text(encoding="utf-8"))
    assert content["world_size"] == entry.processes
    assert content["memory"]["total"] > 0
    assert (content["traffic"] is None) == (entry.processes == 1)


def full_row(name, model):
    """The plan's memory of a row that is full in tokens and patches."""
    entry = PUBLISHED[name]
    recipe = load_recipe(ROOT / f"recipes/{name}.yaml", [f"model.path={model}"])
    settled = recipe.model.settled("bfloat16")
    captured = recipe.training.cuda_graphs != "none"
    return memory_figures(
        settled,
        recipe.parallelism,
        read_sizes(model),
        LargestMicroBatch(1, recipe.packing.max_tokens, recipe.packing.max_vision_patches),
        global_batch_size=recipe.training.global_batch_size,
        world_size=entry.processes,
        trained=trained_sizes(policy_of(recipe), build_encoder(recipe)),
        forms=forms_on(torch.device("cuda"), settled, captured=captured),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_readme_has_its_gpus_and_memory(model_of, name):
    row = re.search(rf"^\| \[?`?{re.escape(name)}.*$", (ROOT / "README.md").read_text(), re.M)
    memory = full_row(name, model_of(name)).total / GIB
    print(f"\n{name}: {memory:.1f} GiB")
    assert row is not None
    assert f"| {PUBLISHED[name].processes} | {memory:.0f} GiB |" in row[0]
    assert memory < 75, "of 80 GB"
