"""`vlmpack recipe new`: lists, writes once, and says what the recipe needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import vlmpack
from vlmpack.cli.app import app
from vlmpack.errors import VlmpackError
from vlmpack.recipe.shipped import missing_paths, shipped_recipes, title, write_recipe

ROOT = Path(__file__).resolve().parents[2]


def test_every_recipe_of_the_folder_is_listed_with_its_title():
    shipped = shipped_recipes()
    assert list(shipped) == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    shown = CliRunner().invoke(app, ["recipe", "new"], env={"COLUMNS": "300"}).stdout
    for name, path in shipped.items():
        assert name in shown and title(path) in shown
    assert title(shipped["digits-padded"]) == (
        "The twin of digits-demo.yaml without packing, in padded rows"
    )


def test_a_recipe_is_written_and_never_over_another(tmp_path):
    path = write_recipe("text-sft", tmp_path)
    assert path.read_bytes() == (ROOT / "recipes/text-sft.yaml").read_bytes()
    path.write_text("mine")
    with pytest.raises(VlmpackError, match=r"text-sft\.yaml is there already"):
        write_recipe("text-sft", tmp_path)
    assert path.read_text() == "mine"
    with pytest.raises(VlmpackError, match="cannot be written: No such file or directory"):
        write_recipe("text-sft", tmp_path / "nowhere" / "my.yaml")


def test_it_is_written_where_it_is_asked_for(tmp_path):
    own = tmp_path / "my.yaml"
    told = CliRunner().invoke(app, ["recipe", "new", "text-sft", "-o", str(own)])
    assert told.exit_code == 0 and f"vlmpack recipe check {own}" in told.output
    assert own.read_bytes() == (ROOT / "recipes/text-sft.yaml").read_bytes()
    own.write_text("mine")
    again = CliRunner().invoke(app, ["recipe", "new", "text-sft", "-o", str(own)])
    assert "my.yaml is there already" in str(again.exception) and own.read_text() == "mine"


@pytest.mark.parametrize("name", ["digit-demo", "digits-demo.yaml", "digits_demo"])
def test_a_name_that_is_near_one_is_told(name, tmp_path):
    with pytest.raises(VlmpackError, match="did you mean 'digits-demo'"):
        write_recipe(name, tmp_path)


def test_a_name_that_is_near_none_lists_them(tmp_path):
    with pytest.raises(
        VlmpackError,
        match=r"there are: digits-boxes, .* digits-cp2, digits-demo, .* text-sft-offline$",
    ):
        write_recipe("../../etc/passwd", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_paths_of_a_recipe_that_are_not_here_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = shipped_recipes()["text-sft"]
    assert missing_paths(recipe) == [
        "assets/tiny-qwen3 (model.path)",
        "assets/text/train-*.tar (data.train)",
        "assets/text/val-*.tar (data.validation)",
        "assets/text/test-*.tar (data.test)",
    ]
    monkeypatch.chdir(ROOT)
    assert missing_paths(recipe) == []


def test_the_command_says_what_to_do_next(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, ["recipe", "new", "digits-lora"])
    assert ran.exit_code == 0
    assert "next: vlmpack recipe check digits-lora.yaml" in ran.stdout
    assert "run it in the root of vlmpack's repository, which has assets/" in ran.stdout
    ran = CliRunner().invoke(app, ["recipe", "new", "qwen2_5_vl-3b-hf"])
    assert "models/Qwen2.5-VL-3B-Instruct (model.path)" in ran.stdout
    assert "which has assets/" not in ran.stdout


def test_the_version_is_printed():
    ran = CliRunner().invoke(app, ["--version"])
    assert (ran.exit_code, ran.stdout) == (0, f"vlmpack {vlmpack.__version__}\n")
