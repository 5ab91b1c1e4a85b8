"""What of a recipe, and of messages about its run, strangers may read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.recipes import MINIMAL, changed

from vlmpack.recipe import load_recipe
from vlmpack.recipe.show import PublicRecipe


def public(**values: object) -> PublicRecipe:
    return PublicRecipe.of(load_recipe(changed(MINIMAL, **values)), Path("runs/test"))


STORED = "https://${env:USER}:${env:WORD}@host/a/x.tar"


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/me/data/train-*.tar", "train-*.tar"),
        ("/mnt/my data/train set/x.tar", "x.tar"),
        ("/mnt/my data/{a,b}/x-{000..009}.tar", "x-{000..009}.tar"),
        ("data/train-*.tar", "data/train-*.tar"),
        ("s3://bucket/my/data/x.tar", "s3://bucket/my/data/x.tar"),
        (STORED, STORED),
    ],
)
def test_a_place_goes_by_its_last_name(path: str, shown: str) -> None:
    values = yaml.safe_load(public(data__train=path).text)
    assert values["data"]["train"][0]["path"] == shown
    assert values["run_dir"] == "runs/test" and values["training"]["max_steps"] == 100


def test_folders_inside_other_values_go_too() -> None:
    tags = ["file:///home/me/data/x.tar", "on /home/me/data/x.tar", "file:/home/me/y z/x.tar"]
    values = yaml.safe_load(public(logging__tags=tags).text)
    assert values["logging"]["tags"] == ["x.tar", "on x.tar", "x.tar"]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("/mnt/my data/train/x.tar: k twice", "x.tar: k twice"),
        ("'/mnt/my data/train/sub/x.tar', file:///mnt/my data/train/y.tar", "'x.tar', y.tar"),
        ("/home/me/x.tar and ~/me/y.tar", "x.tar and y.tar"),
        ("s3://b/mnt/my data/train/x.tar", "s3://b/mnt/my data/train/x.tar"),
        ("https://hub/mnt/data/x or a/mnt/data/x", "https://hub/mnt/data/x or a/mnt/data/x"),
    ],
)
def test_a_message_names_no_folder(message: str, shown: str) -> None:
    data = {"data__train": "/mnt/my data/train/x-*.tar", "data__validation": "/mnt/data/x.tar"}
    assert public(**data).without_places(message) == shown


def test_an_address_keeps_no_secret_in_a_message() -> None:
    said = public().without_places("https://me:word@host/data/x.tar?sig=abc cannot be read")
    assert "word" not in said and "abc" not in said and "host/data/x.tar" in said
