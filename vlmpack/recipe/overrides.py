"""`key=value` overrides on top of a recipe.

`training.max_steps=20` sets one key; the value is YAML (`data.train=[a.tar, b.tar]`,
`optim.max_grad_norm=null`; nothing after `=` is null). A mapping is merged key by key, a list
replaces the whole list, and of two overrides of one key the later one counts.

`max_steps` and `num_epochs` are one choice: an override that sets one of them takes the other,
if it came from the file, out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import permutations

from vlmpack.addresses import redacted
from vlmpack.recipe.problems import Document, KeyPath, Place, Problem, key_name
from vlmpack.recipe.yaml_nodes import parse_yaml

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
    _settle_length(result, written)
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


def _settle_length(result: Document, written: set[KeyPath]) -> None:
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
