"""Problems in a recipe, and the places that they are reported at.

Every stage (YAML, overrides, types, rules) returns `Problem`s that name a key; `render` adds the
file and line, or the override, that the key came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vlmpack.limits import MAX_RECIPE_PROBLEMS
from vlmpack.words import counted, twice

KeyPath = tuple[str | int, ...]
"""A key, from the root: `("data", "train", 0, "path")`."""


_MISSING = object()


class Place(NamedTuple):
    """Where a value was written: a file or an override, and the line (from 1) in a file."""

    label: str
    line: int | None = None

    def __str__(self) -> str:
        return self.label if self.line is None else f"{self.label}:{self.line}"


class Problem(NamedTuple):
    """One thing to correct.

    Args:
        path: the key that it belongs to; empty for the recipe as a whole.
        message: what was found, what was expected, what to do.
        place: where, if `path` alone does not tell (a duplicate key, a line that is not YAML).
    """

    path: KeyPath
    message: str
    place: Place | None = None


@dataclass(slots=True)
class Document:
    """A recipe as plain values, before its types are checked.

    Args:
        root: nested dicts, lists and scalars; any type at the top while not yet checked.
        label: what to call it in messages: the file's path, or "" for a mapping.
        places: where each key was written.
        problems: what was wrong with the text itself.
    """

    root: object
    label: str = ""
    places: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def key_name(path: KeyPath) -> str:
    """`("data", "train", 0, "path")` -> `data.train[0].path`."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(parts).removeprefix(".")


def as_written(path: KeyPath, values: object) -> KeyPath:
    """A key of the checked recipe as it stands in the text: `train: a.tar` has no list and no
    `path`, so `data.train[0].path` is `data.train` there."""
    written: list[str | int] = []
    node: object = values
    for part in path:
        if isinstance(node, dict) and (part in node or isinstance(part, str)):
            node = node.get(part, _MISSING)
        elif isinstance(node, list) and isinstance(part, int):
            node = node[part] if part < len(node) else _MISSING
        elif isinstance(node, dict):
            continue
        elif node is not _MISSING:
            break
        written.append(part)
    return tuple(written)


def listed_twice(path: KeyPath, names: Sequence[str]) -> list[Problem]:
    """One for each name that the list at `path` has more than once."""
    return [Problem(path, f"'{name}' is listed more than once") for name in sorted(twice(names))]


def place_of(path: KeyPath, places: Mapping[KeyPath, Place]) -> Place | None:
    """The place of a key, or of the nearest key around it that was written down."""
    for length in range(len(path), 0, -1):
        if path[:length] in places:
            return places[path[:length]]
    return None


def without_echoes(problems: Iterable[Problem], reported: Iterable[Problem]) -> list[Problem]:
    """The problems that no earlier one of `reported` already explains, at or above their key."""
    explained = {problem.path for problem in reported if problem.path}
    return [
        problem
        for problem in problems
        if not any(problem.path[:length] in explained for length in range(1, len(problem.path) + 1))
    ]


def render(problems: Iterable[Problem], document: Document) -> list[str]:
    """One line per problem, `file:line: key: message`, in the order of the file.

    If there are very many, only the first are given.
    """
    located = []
    for problem in problems:
        place = problem.place or place_of(problem.path, document.places) or Place(document.label)
        located.append((place, problem))
    located.sort(key=lambda pair: _sort_key(pair[0], document.label))
    lines = [
        ": ".join(text for text in (str(place), key_name(problem.path), problem.message) if text)
        for place, problem in located[:MAX_RECIPE_PROBLEMS]
    ]
    more = len(located) - len(lines)
    return [*lines, f"and {counted(more, 'more problem')}"] if more else lines


def _sort_key(place: Place, label: str) -> tuple[bool, bool, int]:
    """File before overrides; numbered lines before what is missing from the file."""
    return (place.label != label, place.line is None, place.line or 0)
