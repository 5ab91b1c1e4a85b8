"""Turns pydantic's errors into problems in a user's words.

Expected values come from the JSON schema, so that a message always agrees with the field. The first
part of the module walks that schema, from a key to the node that describes it. The last part says
what an unknown key may have been meant to be.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vlmpack.addresses import redacted
from vlmpack.limits import MAX_RECIPE_PROBLEMS
from vlmpack.recipe.problems import KeyPath, Problem, as_written, key_name
from vlmpack.recipe.sources import IN_WORDS
from vlmpack.recipe.yaml_nodes import parse_yaml
from vlmpack.whole_file import regular_text


@dataclass(frozen=True, kw_only=True)
class ForeignKeys:
    """The tables of `foreign_keys.yaml`, which says what each one holds."""

    fields: Mapping[str, str]
    values: Mapping[str, str]
    sections: Mapping[str, str]
    derived: Mapping[str, str]
    unsupported: Mapping[str, str]
    frameworks: Mapping[str, frozenset[str]]


@cache
def foreign_keys() -> ForeignKeys:
    """Keys of other frameworks' configuration, read once."""
    text = regular_text(Path(__file__).with_name("foreign_keys.yaml"))
    tables = parse_yaml(text, "foreign_keys.yaml").root
    assert isinstance(tables, dict)
    listed = {name: frozenset(keys.split()) for name, keys in tables.pop("frameworks").items()}
    return ForeignKeys(frameworks=listed, **tables)


def is_foreign(section: str, value: object) -> bool:
    """Whether the keys below an unknown one are reported one by one."""
    is_theirs = section in foreign_keys().sections
    return is_theirs and isinstance(value, Mapping) and bool({*value} - {"path"})


def suggest_key(
    key: str, parent: str, here: Sequence[str], everywhere: Mapping[str, Sequence[str]]
) -> str:
    """The second half of an "unknown key" message.

    Args:
        parent: the dotted name of the mapping that it stands in, "" for the root.
        everywhere: every key of a recipe -> the dotted names that it occurs under.
    """
    foreign = foreign_keys()
    ours = foreign.sections.get(parent, parent)
    if key in foreign.derived:
        return f"it is not set but derived: {foreign.derived[key]}"
    for name, why in foreign.unsupported.items():
        if key == name or key.startswith(f"{name}_"):
            return f"it is not there: {why}"
    full_key = f"{parent}.{key}" if parent else key
    if "." in full_key and full_key in foreign.fields:
        return _renamed(full_key, parent)
    dotted = {name for names in everywhere.values() for name in names}
    if key in dotted and "." in key:
        section, _, last = key.rpartition(".")
        return f"in a file, write '{last}' below '{section}:' (dots are for overrides)"
    own = f"{ours}.{key}"
    if own in everywhere.get(key, ()):
        return f"did you mean '{own}'?"
    if key in everywhere:
        owners = " or ".join(
            f"'{name.rpartition('.')[0] or 'the top'}'" for name in everywhere[key]
        )
        return f"'{key}' belongs to {owners}"
    if key in foreign.fields:
        return _renamed(key, parent)
    if theirs := [framework for framework, names in foreign.frameworks.items() if key in names]:
        return f"a key of {', '.join(theirs)} that nothing here takes the place of"
    for candidates in (here, tuple(everywhere)):
        if match := difflib.get_close_matches(key, candidates, n=1):
            return _did_you_mean(match[0] if match[0] in here else everywhere[match[0]][0], parent)
    if not here:  # below a section of another framework
        return f"no knob of that name; {ours} has most of what is in {parent}"
    return f"known keys here: {', '.join(here)}"


def suggest_value(value: object, allowed: Sequence[str]) -> str:
    """`; did you mean 'in_batch'?`, or nothing if no allowed value is close."""
    match = difflib.get_close_matches(str(value).lower().replace("-", "_"), allowed, n=1)
    return f"; did you mean '{match[0]}'?" if match else ""


def _renamed(key: str, parent: str) -> str:
    foreign = foreign_keys()
    value = f" It is {foreign.values[key]}" if key in foreign.values else ""
    return _did_you_mean(foreign.fields[key], parent) + value


def _did_you_mean(name: str, parent: str) -> str:
    """The suggestion, by its last part where that is enough."""
    prefix = f"{parent}." if parent else ""
    return f"did you mean '{name.removeprefix(prefix)}'?"


Node = Mapping[str, Any]
"""A node of a JSON schema."""


def resolved(node: Node, schema: Node) -> Node:
    while "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    return node


def options(node: Node, schema: Node) -> Iterator[Node]:
    """Each alternative of a union, or the node itself."""
    node = resolved(node, schema)
    if "anyOf" in node:
        for option in node["anyOf"]:
            yield from options(option, schema)
    else:
        yield node


def properties(node: Node, schema: Node) -> Mapping[str, Node]:
    """The keys that a mapping of this form has."""
    return {
        name: inner
        for option in options(node, schema)
        for name, inner in option.get("properties", {}).items()
    }


def items(node: Node, index: int, schema: Node) -> Node:
    """The form of one item of a list; empty where the node is no list."""
    for option in options(node, schema):
        if "prefixItems" in option:
            return dict(option["prefixItems"][min(index, len(option["prefixItems"]) - 1)])
        if "items" in option:
            return dict(option["items"])
    return {}


def node_at(schema: Node, location: KeyPath) -> Node:
    """The node of a key, its description and examples included; empty where there is none."""
    node: Node = schema
    for part in location:
        if isinstance(part, int):
            node = items(node, part, schema)
        else:
            node = properties(node, schema).get(part, {})
    return node


def allowed_values(node: Node, schema: Node) -> list[str]:
    """The values of an enumeration; empty where the node is none."""
    return [
        str(value)
        for option in options(node, schema)
        for value in option.get("enum", [option["const"]] if "const" in option else [])
    ]


def all_keys(schema: Node) -> dict[str, list[str]]:
    """The dotted names under which each key of a recipe occurs; keys of sources are left out."""
    keys: dict[str, list[str]] = {}
    pending: list[tuple[str, Node]] = [("", schema)]
    while pending:
        prefix, node = pending.pop(0)
        for key, inner in resolved(node, schema).get("properties", {}).items():
            keys.setdefault(key, []).append(prefix + key)
            pending.append((f"{prefix}{key}.", inner))
    return keys


_UNKNOWN_KEY = {"extra_forbidden", "unexpected_keyword_argument"}
_BOUNDS = (
    ("minimum", ">="),
    ("exclusiveMinimum", ">"),
    ("maximum", "<="),
    ("exclusiveMaximum", "<"),
)
_MAX_SHOWN = 60


def explain(error: ValidationError, values: object, schema: Node) -> list[Problem]:
    """One problem per error.

    Args:
        values: the plain values that it was given; keys are named as they stand there.
    """
    errors, advice = error.errors(include_url=False), _Advice(schema)
    problems = [one for details in errors for one in _explained(details, values, advice)]
    taken = {
        (one.path[:-1], one.message) for one in problems if one.message.startswith("unknown key")
    }
    problems = [
        one
        for one in problems
        if not one.message.startswith("required, ")
        or (one.path[:-1], f"unknown key; did you mean '{one.path[-1]}'?") not in taken
    ]
    return list(dict.fromkeys(problems))  # a union tells of each of its alternatives


class _Advice:
    """Suggestions for unknown keys. A full comparison is slow, so only the first keys get one."""

    def __init__(self, schema: Node) -> None:
        self.schema = schema
        self._keys = all_keys(schema)
        self._left = MAX_RECIPE_PROBLEMS

    def problem(self, path: KeyPath, parent: str, here: Sequence[str]) -> Problem:
        """An unknown key."""
        self._left -= 1
        if self._left < 0:
            return Problem(path, "unknown key")
        return Problem(path, f"unknown key; {suggest_key(str(path[-1]), parent, here, self._keys)}")


def _explained(details: ErrorDetails, values: object, advice: _Advice) -> list[Problem]:
    """One problem, or one for each key below another framework's section."""
    location, below = details["loc"], details["input"]
    is_section = details["type"] in _UNKNOWN_KEY and len(location) == 1
    if not is_section or not is_foreign(str(location[0]), below):
        return [_explain_one(details, values, advice)]
    return _each_below((str(location[0]),), below, advice)


def _each_below(path: KeyPath, below: Mapping[object, object], advice: _Advice) -> list[Problem]:
    """One problem for each key of another framework's section, and of the sections in it."""
    problems: list[Problem] = []
    for key, value in ((str(key), value) for key, value in below.items()):
        if isinstance(value, Mapping) and is_foreign(key, value):
            problems += _each_below((*path, key), value, advice)
        else:
            problems.append(advice.problem((*path, key), str(path[-1]), []))
    return problems


def _explain_one(details: ErrorDetails, values: object, advice: _Advice) -> Problem:
    kind, location, schema = details["type"], details["loc"], advice.schema
    path = as_written(location, values)
    if kind == "missing" and isinstance(location[-1], int):
        path, location = path[:-1], location[:-1]
    elif kind == "missing":
        return Problem(path, _missing_message(path, node_at(schema, location)))
    if kind in _UNKNOWN_KEY:
        here = list(properties(node_at(schema, location[:-1]), schema))
        return advice.problem(path, key_name(path[:-1]), here)
    if kind == IN_WORDS:
        return Problem(path, details["msg"])
    node = node_at(schema, location)
    if not node and "anyOf" in node_at(schema, location[:-1]):  # one alternative of a union
        node = node_at(schema, location[:-1])
        value = details["input"]
        meant = suggest_value(value, allowed_values(node, schema)) if isinstance(value, str) else ""
        return Problem(path, f"expected {describe(node, schema)}, found {shown(value)}{meant}")
    allowed, value = allowed_values(node, schema), details["input"]
    if allowed and kind == "literal_error":
        listed = ", ".join(allowed)
        message = f"{shown(value)} is not one of {listed}{suggest_value(value, allowed)}"
        return Problem(path, message)
    what = "something else" if "credentials" in location else shown(value)
    return Problem(path, f"expected {describe(node, schema)}, found {what}")


def _missing_message(path: KeyPath, node: Node) -> str:
    section, key = key_name(path[:-1]), path[-1]
    examples = node.get("examples", ())
    text = f"required, but missing; add '{key}: {examples[0]}'" if examples else "missing"
    return f"{text} below '{section}:'" if section else f"{text} at the top"


def shown(value: object) -> str:
    """A value as a recipe would spell it, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "an empty list" if not value else f"a list of {len(value)}"
    text = redacted(repr(value))
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def describe(node: Node, schema: Node) -> str:
    """What a JSON schema node accepts, in words: `an integer >= 1 or null`."""
    node = resolved(node, schema)
    if "anyOf" in node:
        return _describe_union(node["anyOf"], schema)
    if "const" in node:
        return shown(node["const"])
    if "enum" in node:
        return f"one of {', '.join(map(str, node['enum']))}"
    bounds = " and ".join(f"{sign} {node[name]:g}" for name, sign in _BOUNDS if name in node)
    match node.get("type"):
        case "integer":
            return f"an integer {bounds}".rstrip()
        case "number":
            return f"a number {bounds}".rstrip()
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "array":
            return _describe_list(node, schema)
        case "object":
            keys = node.get("properties")
            return f"a mapping ({', '.join(keys)})" if keys else "a mapping of names to values"
    if node.get("format") == "date":
        return "a date such as 2026-11-22"
    if "pattern" in node:
        return "a name of letters, digits, '.', '_' and '-'"
    return "a string that is not empty" if node.get("minLength") else "a string"


def _describe_union(options: Sequence[Node], schema: Node) -> str:
    words: list[str] = []
    for option in options:
        single = " or ".join(words)
        text = describe(option, schema)
        words.append("a list of these" if text == f"a list, each item {single}" else text)
    return " or ".join(words)


def _describe_list(node: Node, schema: Node) -> str:
    if "prefixItems" in node:
        inner = describe(node["prefixItems"][0], schema)
        return f"a list of {len(node['prefixItems'])}, each {inner}"
    return f"a list, each item {describe(node.get('items', {}), schema)}"
