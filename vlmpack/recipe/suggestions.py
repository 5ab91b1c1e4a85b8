"""What an unknown key may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vlmpack.recipe.yaml_nodes import parse_yaml
from vlmpack.whole_file import regular_text


@dataclass(frozen=True, kw_only=True)
class ForeignKeys:
    """The tables of `foreign_keys.yaml`, which says what each one holds."""

    fields: Mapping[str, str]
    values: Mapping[str, str]
    sections: Mapping[str, str]
    derived: Mapping[str, str]
    absent: Mapping[str, str]
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
    for name, why in foreign.absent.items():
        if key == name or key.startswith(f"{name}_"):
            return f"it is not there: {why}"
    placed = f"{parent}.{key}" if parent else key
    if "." in placed and placed in foreign.fields:
        return _renamed(placed, parent)
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
