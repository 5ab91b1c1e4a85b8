"""The YAML reader: plain values with lines, and nothing that a text can set in motion."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import vlmpack
from vlmpack.errors import RecipeError
from vlmpack.limits import MAX_RECIPE_DEPTH
from vlmpack.recipe import load_recipe
from vlmpack.recipe.yaml_nodes import parse_yaml


def test_values_and_lines():
    document = parse_yaml("a:\n  b: [1, x,\n      2e-3]\nc: {d: null}\n", "f")
    assert document.problems == []
    assert document.root == {"a": {"b": [1, "x", 0.002]}, "c": {"d": None}}
    lines = {path: place.line for path, place in document.places.items()}
    assert lines == {
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "b", 0): 2,
        ("a", "b", 1): 2,
        ("a", "b", 2): 3,
        ("c",): 4,
        ("c", "d"): 4,
    }


@pytest.mark.parametrize("text", ["yes", "on", "12:30", "2024-01-01", "010", "0x10", ".inf", "a#b"])
def test_yaml_1_1_surprises_are_strings(text):
    assert parse_yaml(f"k: {text}", "f").root == {"k": text}


@pytest.mark.parametrize("text", ["'1'", '"true"', "'null'", '"2e-3"'])
def test_quoted_scalars_are_strings(text):
    assert parse_yaml(f"k: {text}", "f").root == {"k": text[1:-1]}


@pytest.mark.parametrize(
    "text",
    [
        "model: !!python/object/apply:os.system ['touch {marker}']",
        "model: !!python/name:os.system",
        "!!python/object/apply:os.system ['touch {marker}']: 1",
        "run_dir: !env HOME",
        "run_dir: !!binary aGVsbG8=",
        "run_dir: ! x",
        "model: {_target_: os.system, args: [touch {marker}]}",
        "model: {__class__: os.system}",
        "data: {train: 'pipe:touch {marker}'}",
        "run_dir: $(touch {marker})",
        "run_dir: ${oc.env:HOME}",
    ],
)
def test_recipe_cannot_name_code(write, good_text, tmp_path, text):
    marker = tmp_path / "marker"
    text = text.replace("{marker}", str(marker))
    section = text.split(":")[0]
    document = yaml.safe_load(good_text)
    document.pop(section, None)
    path = write(yaml.safe_dump(document) + text + "\n")
    with pytest.raises(RecipeError, match=r"not allowed|unknown key|not expanded|not valid YAML|k"):
        load_recipe(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "given twice, first in line 1"),
        ("a: &x 1\nb: *x\n", 1, "anchor '&x' is not allowed"),
        ("a: &x 1\nb: *x\n", 2, "alias '*x' is not allowed"),
        ("a: &x {c: 1}\nb:\n  <<: *x\n", 3, "merge keys are not allowed"),
        ("a: 1\nb: !!set {c}\n", 2, "tag '!!set' is not allowed"),
        ("a: 1\n--- \nb: 1\n", 2, "a second document"),
        ("a: 1\n[b]: 1\n", 2, "expected a key"),
        ("a:\n\tb: 1\n", 2, "indent with spaces"),
        ("a: *.tar\n", 1, "quotes around text that starts with *"),
    ],
)
def test_problems_have_their_line(text, line, message):
    problems = parse_yaml(text, "f").problems
    assert any(message in p.message and p.place == ("f", line) for p in problems), problems


def test_clean_text_has_no_problems(good_text):
    assert parse_yaml(good_text, "f").problems == []


def test_nesting_is_bounded():
    def nested(depth: int) -> str:
        return "[" * depth + "]" * depth

    assert parse_yaml(nested(MAX_RECIPE_DEPTH), "f").problems == []
    (problem,) = parse_yaml(nested(5000), "f").problems
    assert "levels deep" in problem.message


def test_environment_references_stay_text():
    assert parse_yaml("k: ${env:TOKEN}", "f").root == {"k": "${env:TOKEN}"}


def test_all_yaml_is_read_by_one_reader_without_aliases() -> None:
    """PyYAML's own loaders follow aliases: a kilobyte of them stands for as much as one likes."""
    package = Path(vlmpack.__file__).parent
    loads = re.compile(r"\byaml\.(\w*load\w*|parse|compose\w*|scan)\(|from yaml import")
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if loads.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"recipe/yaml_nodes.py"}
