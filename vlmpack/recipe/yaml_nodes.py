"""YAML text -> plain values and the line of every key.

The reader is built on PyYAML's event stream, below its constructors, so that no text can create an
object. A tag of any kind is a problem. Anchors, aliases and `<<` merges are problems too, since a
value would then act far from the line it is written on. Scalars follow YAML 1.2. `2e-3` is a
number, while `yes`, `on` and `12:30` are strings. `${env:NAME}` stays the string it is."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

from vlmpack.limits import MAX_RECIPE_DEPTH
from vlmpack.recipe.problems import Document, KeyPath, Place, Problem

INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]{0,30})")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9_]{0,30})(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?")
_WORDS: dict[str, object] = {"": None, "~": None} | {
    spelled: value
    for word, value in (("null", None), ("true", True), ("false", False))
    for spelled in (word, word.capitalize(), word.upper())
}


class _NotYamlError(Exception):
    """The text stops being YAML, or a recipe, at some line."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


def parse_yaml(text: str, label: str) -> Document:
    """Plain values of one YAML document, with a place for each key and the problems found.

    Args:
        text: the YAML text.
        label: what the places call it: a file's path.
    """
    reader = _Reader(text, label)
    try:
        root = reader.read()
    except _NotYamlError as error:
        place = Place(label, error.line)
        return Document(None, label, problems=[Problem((), str(error), place)])
    return Document(root, label, reader.places, reader.problems)


def plain_scalar(text: str) -> object:
    """The value of an unquoted YAML scalar: null, bool, int, float, or the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    if INTEGER.fullmatch(text):
        return int(text.replace("_", ""))
    if FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


class _Reader:
    """Reads one document off the event stream, top down."""

    def __init__(self, text: str, label: str) -> None:
        self._events = _events(text)
        self._label = label
        self.places: dict[KeyPath, Place] = {}
        self.problems: list[Problem] = []

    def read(self) -> object:
        event = next(self._events)
        while isinstance(event, (yaml.StreamStartEvent, yaml.DocumentStartEvent)):
            event = next(self._events)
        if isinstance(event, yaml.StreamEndEvent):
            return None
        root = self._value(event, ())
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                message = "a second document ('---') starts here; a recipe is one"
                raise _NotYamlError(message, self._place(event).line)
        return root

    def _value(self, event: yaml.Event, path: KeyPath) -> object:
        place = self._place(event)
        if len(path) > MAX_RECIPE_DEPTH:
            raise _NotYamlError(f"nested more than {MAX_RECIPE_DEPTH} levels deep", place.line)
        if isinstance(event, yaml.AliasEvent):
            self._report(path, f"the alias '*{event.anchor}' is not allowed; {_SPELL_OUT}", place)
            return None
        assert isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent))
        if event.anchor is not None:
            self._report(path, f"the anchor '&{event.anchor}' is not allowed; {_SPELL_OUT}", place)
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._report(path, f"the YAML tag '{tag}' is not allowed; {_NO_CODE}", place)
        if isinstance(event, yaml.ScalarEvent):
            return plain_scalar(event.value) if event.implicit[0] else event.value
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        return self._sequence(path)

    def _mapping(self, path: KeyPath) -> dict[str, object]:
        values: dict[str, object] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            place = self._place(event)
            key = self._key(event, path, place)
            inner = (*path, key)
            if key in values:
                first = self.places[inner].line
                self._report(inner, f"the key is given twice, first in line {first}", place)
            else:
                self.places[inner] = place
            values[key] = self._value(next(self._events), inner)
        return values

    def _key(self, event: yaml.Event, path: KeyPath, place: Place) -> str:
        """The key as text; what cannot be one is reported."""
        if not isinstance(event, yaml.ScalarEvent):
            raise _NotYamlError("expected a key, found a list, a mapping or an alias", place.line)
        key = str(event.value)
        if key == "<<":
            self._report((*path, key), f"merge keys are not allowed; {_SPELL_OUT}", place)
        elif event.tag is not None or event.anchor is not None:
            self._report((*path, key), f"tags and anchors are not allowed; {_NO_CODE}", place)
        return key

    def _sequence(self, path: KeyPath) -> list[object]:
        values: list[object] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            inner = (*path, len(values))
            self.places[inner] = self._place(event)
            values.append(self._value(event, inner))
        return values

    def _place(self, event: yaml.Event) -> Place:
        return Place(self._label, event.start_mark.line + 1 if event.start_mark else None)

    def _report(self, path: KeyPath, message: str, place: Place) -> None:
        self.problems.append(Problem(path, message, place))


_SPELL_OUT = "write the value out (and quote text that starts with * or &)"
_NO_CODE = "a recipe holds plain values only (and text that starts with ! needs quotes)"


def _events(text: str) -> Iterator[yaml.Event]:
    """PyYAML's events, with its errors turned into ours."""
    try:
        yield from yaml.parse(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        message = f"not valid YAML: {what}{_hint(what)}"
        raise _NotYamlError(message, mark.line + 1 if mark else None) from None
    except yaml.YAMLError as error:
        raise _NotYamlError(f"not valid YAML: {error}".splitlines()[0], None) from None


def _hint(what: str) -> str:
    """What to do about PyYAML's commonest complaints."""
    if "'\\t'" in what:
        return "; indent with spaces"
    if "alias" in what or "anchor" in what or "cannot start any token" in what:
        return "; put quotes around text that starts with * & % @ or a backtick"
    return ""
