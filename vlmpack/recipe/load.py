"""From a file, a mapping or a recipe, plus overrides, to a checked `Recipe`.

text -> plain values with lines (`yaml_nodes`) -> overrides on top -> types (`schema`) -> rules.
Each stage reports what it can and lets the next one go on, so one RecipeError has all problems.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from vlmpack.errors import RecipeError
from vlmpack.limits import MAX_RECIPE_BYTES
from vlmpack.recipe.messages import explain, shown
from vlmpack.recipe.overrides import apply_overrides
from vlmpack.recipe.path_rules import anchored
from vlmpack.recipe.problems import Document, Problem, as_written, render, without_echoes
from vlmpack.recipe.rules import broken_rules
from vlmpack.recipe.schema import Recipe
from vlmpack.recipe.show import json_schema
from vlmpack.recipe.sources import Section
from vlmpack.recipe.yaml_nodes import parse_yaml
from vlmpack.whole_file import open_regular

SECTIONS: Mapping[str, type[Section]] = {
    name: field.annotation
    for name, field in Recipe.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


def load_recipe(
    source: str | os.PathLike[str] | Mapping[str, object] | Recipe,
    overrides: Sequence[str] | Mapping[str, object] = (),
    *,
    base_dir: str | os.PathLike[str] | None = None,
    world_size: int | None = None,
) -> Recipe:
    """A checked recipe, or one RecipeError that lists every problem with its place.

    Args:
        source: path of a YAML file, a mapping of plain values, or a recipe to change.
        overrides: `key=value` texts (`training.max_steps=20`), or a mapping from dotted keys to
            values; applied on top, in order.
        base_dir: folder that relative paths in the recipe start at. None: they stay as written
            and start at the current directory.
        world_size: number of processes the run will have; also checks that batch and parallel
            sizes divide it. None: checked later, by `check_world`.
    """
    document = _with_sections(apply_overrides(_read(source), overrides))
    recipe, sections, problems = _typed(document)
    for problem in document.problems:
        sections.pop(str(problem.path[0]) if problem.path else "", None)
    broken = broken_rules(sections, base_dir, world_size)
    problems += [rule._replace(path=as_written(rule.path, document.root)) for rule in broken]
    problems = document.problems + without_echoes(problems, document.problems)
    if problems or recipe is None:
        raise RecipeError(render(problems, document))
    return recipe if base_dir is None else anchored(recipe, base_dir)


def _read(source: str | os.PathLike[str] | Mapping[str, object] | Recipe) -> Document:
    """The source as a document whose root is a mapping; raises if it is nothing of the kind."""
    if isinstance(source, Recipe):
        return Document(source.model_dump(mode="json"))
    if isinstance(source, Mapping):
        return Document(source)
    label = os.fspath(source)
    document = parse_yaml(_text(label), label)
    if document.root is None:
        empty = Problem(
            (), "the file is empty; `vlmpack recipe new digits-demo` writes a complete one"
        )
        raise RecipeError(render(document.problems or [empty], document))
    if not isinstance(document.root, dict):
        found = shown(document.root)
        message = f"expected sections at the top ({', '.join(SECTIONS)}), found {found}"
        raise RecipeError(render([*document.problems, Problem((), message)], document))
    return document


def _text(path: str) -> str:
    """The file's text; every reason not to have it is a RecipeError."""
    try:
        with open_regular(Path(path)) as file:
            content = file.read(MAX_RECIPE_BYTES + 1)
        if len(content) > MAX_RECIPE_BYTES:
            raise RecipeError([f"{path}: larger than {MAX_RECIPE_BYTES} bytes; not a recipe"])
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise RecipeError([f"{path}:{line}: not UTF-8 text"]) from None
    except FileNotFoundError:
        raise RecipeError([f"{path}: no such file (in {Path.cwd()})"]) from None
    except OSError as error:
        raise RecipeError([f"{path}: cannot be read: {error.strerror or error}"]) from None


def _with_sections(document: Document) -> Document:
    """Sections that are absent, or have no key below them, as empty mappings: a key that is
    missing in them is then reported by its full name."""
    root = document.root if isinstance(document.root, dict) else {}
    for name in SECTIONS:
        if root.get(name) is None:
            root[name] = {}
    document.root = root
    return document


def _typed(document: Document) -> tuple[Recipe | None, dict[str, object], list[Problem]]:
    """The recipe if all types are right, the top-level values whose own types are, and the
    problems of the others."""
    values = document.root
    assert isinstance(values, dict)
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        problems = explain(error, values, json_schema())
        wrong = {problem.path[0] for problem in problems if problem.path}
        sections: dict[str, object] = {}
        for name, section in SECTIONS.items():
            if name in wrong:
                continue
            # A problem may be named where it was written, which is not where it was found.
            with suppress(ValidationError):
                sections[name] = section.model_validate(values[name])
        if isinstance(values.get("run_dir"), str) and "run_dir" not in wrong:
            sections["run_dir"] = values["run_dir"]
        return None, sections, problems
    sections = {name: getattr(recipe, name) for name in Recipe.model_fields}
    return recipe, sections, []
