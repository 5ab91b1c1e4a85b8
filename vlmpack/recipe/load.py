"""From a file, a mapping or a recipe, plus overrides, to a checked `Recipe`.

text -> plain values with lines (`yaml_nodes`) -> overrides on top -> types (`schema`) -> rules.
Each stage reports what it can and lets the next one go on, so one RecipeError has all problems.

An override is `key=value`. The value is YAML (`data.train=[a.tar, b.tar]`,
`optim.max_grad_norm=null`), and nothing after `=` is null. A mapping is merged key by key. A list
replaces the whole list. Of two overrides of one key the later one counts.

`max_steps` and `num_epochs` are one choice. An override that sets one of them removes the other,
if the other came from the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import permutations
from pathlib import Path

from pydantic import ValidationError

from vlmpack.addresses import redacted
from vlmpack.errors import RecipeError
from vlmpack.limits import MAX_RECIPE_BYTES
from vlmpack.recipe.data_rules import anchored
from vlmpack.recipe.messages import explain, shown
from vlmpack.recipe.problems import (
    Document,
    KeyPath,
    Place,
    Problem,
    as_written,
    key_name,
    render,
    without_echoes,
)
from vlmpack.recipe.rules import broken_rules
from vlmpack.recipe.schema import Recipe
from vlmpack.recipe.show import json_schema
from vlmpack.recipe.sources import Section
from vlmpack.recipe.trainable_rules import read_adapter_config
from vlmpack.recipe.yaml_nodes import parse_yaml
from vlmpack.whole_file import open_regular

_MAX_LABEL = 80


def apply_overrides(
    document: Document, overrides: Sequence[str] | Mapping[str, object]
) -> Document:
    """The document with the overrides on top; the one passed in stays as it was.

    Args:
        document: a recipe whose root is a mapping.
        overrides: `key=value` texts, or a mapping from dotted keys to values.
    """
    result = Document(
        _copied(document.root), document.label, dict(document.places), list(document.problems)
    )
    if isinstance(overrides, Mapping):
        pairs = [(key, value, f"{key}={value}") for key, value in overrides.items()]
    else:
        pairs = [pair for text in overrides for pair in _parsed(text, result)]
    written: set[KeyPath] = set()
    for key, value, text in pairs:
        _assign(result, tuple(key.split(".")), _copied(value), _label(text), written)
    _drop_replaced_length(result, written)
    return result


def _label(text: str) -> Place:
    if "credentials" in text:
        text = f"{text.partition('=')[0]}=***"
    text = redacted(text)
    short = text if len(text) <= _MAX_LABEL else text[: _MAX_LABEL - 3] + "..."
    return Place(f"override '{short}'")


def _parsed(text: str, result: Document) -> list[tuple[str, object, str]]:
    """`[(dotted key, value, text)]`, or nothing and a problem."""
    key, equals, value_text = text.partition("=")
    place = _label(text)
    if not equals or not all(key.strip().split(".")):
        message = "expected key=value, for example training.max_steps=20"
        result.problems.append(Problem((), message, place))
        return []
    value = parse_yaml(value_text, str(place))
    result.problems += [
        Problem(tuple(key.strip().split(".")), problem.message, place) for problem in value.problems
    ]
    return [] if value.problems else [(key.strip(), value.root, text)]


def _assign(
    result: Document, path: KeyPath, value: object, place: Place, written: set[KeyPath]
) -> None:
    """Put one value at its key, merging mappings; report a key that leads into a list."""
    node = result.root
    assert isinstance(node, dict)
    for depth, part in enumerate(path[:-1]):
        if node.get(part) is None:
            node[part] = {}
            result.places[path[: depth + 1]] = place
        node = node[part]
        if not isinstance(node, dict):
            parent = key_name(path[: depth + 1])
            message = f"'{parent}' has no keys below it; replace it as a whole: {parent}=..."
            result.problems.append(Problem(path, message, place))
            return
    old = node.get(path[-1])
    if isinstance(value, dict) and value and (old is None or isinstance(old, dict)):
        node[path[-1]] = old if isinstance(old, dict) else {}
        result.places.setdefault(path, place)
        for key, inner in value.items():
            _assign(result, (*path, key), inner, place, written)
        return
    node[path[-1]] = value
    if isinstance(old, dict | list):
        for known in [known for known in result.places if known[: len(path)] == path]:
            del result.places[known]
    result.places[path] = place
    written.add(path)


def _drop_replaced_length(result: Document, written: set[KeyPath]) -> None:
    """Drop `max_steps` or `num_epochs` where an override of the other one replaces it."""
    assert isinstance(result.root, dict)
    training = result.root.get("training")
    for chosen, other in permutations(("max_steps", "num_epochs")):
        only_chosen = ("training", chosen) in written and ("training", other) not in written
        if only_chosen and isinstance(training, dict) and training.get(chosen) is not None:
            training.pop(other, None)
            result.places.pop(("training", other), None)


def _copied(value: object) -> object:
    """A copy of nested mappings and sequences, as dicts and lists; paths as strings."""
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(inner) for inner in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


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
        world_size: number of processes that the run will have. Batch and parallel sizes must divide
            it. With None, `check_world` checks that later.
    """
    document = _with_sections(apply_overrides(_read(source), overrides))
    _add_adapter_settings(document, base_dir)
    recipe, sections, problems = _typed(document)
    for problem in document.problems:
        sections.pop(str(problem.path[0]) if problem.path else "", None)
    broken = broken_rules(sections, base_dir, world_size)
    problems += [rule._replace(path=as_written(rule.path, document.root)) for rule in broken]
    problems = document.problems + without_echoes(problems, document.problems)
    if problems or recipe is None:
        raise RecipeError(render(problems, document))
    return recipe if base_dir is None else anchored(recipe, base_dir)


def located(
    lines: Sequence[str], path: str, overrides: Sequence[str] | Mapping[str, object]
) -> list[str]:
    """Lines of the form `key: message` about a recipe that loads, each with its place."""
    document = apply_overrides(_read(path), overrides)
    parts = [line.partition(": ") for line in lines]
    return render([Problem(tuple(key.split(".")), said) for key, _, said in parts], document)


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
        value = shown(document.root)
        message = f"expected sections at the top ({', '.join(SECTIONS)}), found {value}"
        raise RecipeError(render([*document.problems, Problem((), message)], document))
    return document


def _text(path: str) -> str:
    """The file's text; every reason not to have it is a RecipeError."""
    try:
        with open_regular(Path(path)) as file:
            content = file.read(MAX_RECIPE_BYTES + 1)
        if len(content) > MAX_RECIPE_BYTES:
            raise RecipeError(f"{path}: larger than {MAX_RECIPE_BYTES} bytes; not a recipe")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise RecipeError(f"{path}:{line}: not UTF-8 text") from None
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file (in {Path.cwd()})") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror or error}") from None


def _with_sections(document: Document) -> Document:
    """Empty mappings for missing sections, so that their missing keys are reported by full name."""
    root = document.root if isinstance(document.root, dict) else {}
    for name in SECTIONS:
        if root.get(name) is None:
            root[name] = {}
    document.root = root
    return document


def _add_adapter_settings(document: Document, base_dir: str | os.PathLike[str] | None) -> None:
    """Give `trainable.lora` what it leaves out as `model.adapter` has it."""
    root = document.root
    assert isinstance(root, dict)
    model, trainable = root["model"], root["trainable"]
    folder = model.get("adapter") if isinstance(model, dict) else None
    if not isinstance(folder, str) or not isinstance(trainable, dict):
        return
    lora, adapter = trainable.get("lora"), read_adapter_config(folder, base_dir)
    if "lora" in trainable.values() and isinstance(lora, dict | None):
        said: dict[str, object] = {"targets": "adapter"}
        if adapter is not None and adapter.refusal is None:
            said |= dict(adapter.settings())
        trainable["lora"] = said | (lora or {})


def _typed(document: Document) -> tuple[Recipe | None, dict[str, object], list[Problem]]:
    """The recipe if all types are right, valid top-level values, and problems of the others."""
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
