"""The recipes that ship with the repository load, and say what they claim to say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vlmpack.recipe import identity, identity_differences, load_recipe, notes

FOLDER = Path(__file__).parents[2] / "recipes"
WORLD_SIZE = {"qwen2_5_vl-3b-hf.yaml": 8}
FILES = sorted(FOLDER.glob("*.yaml"))


def test_there_are_recipes():
    assert {"digits-demo.yaml", "digits-padded.yaml", "qwen2_5_vl-3b-hf.yaml"} <= {
        file.name for file in FILES
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_recipe_loads_without_notes(file):
    world_size = WORLD_SIZE.get(file.name, 1)
    assert notes(load_recipe(file, world_size=world_size), world_size) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_commands_in_the_comments_work(file):
    commands = re.findall(r"^#.* finetune recipes/(\S+)(.*)$", file.read_text(), re.MULTILINE)
    assert commands
    for name, overrides in commands:
        assert name == file.name
        load_recipe(FOLDER / name, overrides.split())


def test_padded_twin_differs_in_packing_alone():
    demo, padded = (
        identity(load_recipe(FOLDER / name)) for name in ("digits-demo.yaml", "digits-padded.yaml")
    )
    assert identity_differences(demo, padded) == [
        "packing.mode: 'in_batch' in the run folder, 'none' in the recipe"
    ]
