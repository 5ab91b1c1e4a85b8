"""What an unknown key may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from vlmpack.recipe.foreign_keys import ELSEWHERE, FOREIGN, MEANS
from vlmpack.recipe.foreign_names import ABSENT, DERIVED, NAMES


def is_foreign(section: str, value: object) -> bool:
    """Whether the keys below an unknown one are worth a word each: it is another framework's
    section, and no source of ours in the wrong place."""
    return section in FOREIGN and isinstance(value, Mapping) and bool({*value} - {"path"})


def suggest_key(
    key: str, parent: str, here: Sequence[str], everywhere: Mapping[str, Sequence[str]]
) -> str:
    """The second half of an "unknown key" message.

    Args:
        key: the key that is not known.
        parent: the dotted name of the mapping that it stands in, "" for the root.
        here: the keys that this mapping does have.
        everywhere: every key of a recipe -> the dotted names that it occurs under.
    """
    if key in DERIVED:
        return f"it is not set but derived: {DERIVED[key]}"
    for name, why in ABSENT.items():
        if key == name or key.startswith(f"{name}_"):
            return f"it is not there: {why}"
    placed = f"{parent}.{key}" if parent else key
    if "." in placed and placed in ELSEWHERE:
        return _renamed(placed, parent)
    dotted = {name for names in everywhere.values() for name in names}
    if key in dotted and "." in key:
        section, _, last = key.rpartition(".")
        return f"in a file, write '{last}' below '{section}:' (dots are for overrides)"
    own = f"{FOREIGN.get(parent, parent)}.{key}"
    if own in everywhere.get(key, ()):
        return f"did you mean '{own}'?"
    if key in everywhere:
        owners = " or ".join(
            f"'{name.rpartition('.')[0] or 'the top'}'" for name in everywhere[key]
        )
        return f"'{key}' belongs to {owners}"
    if key in ELSEWHERE:
        return _renamed(key, parent)
    if theirs := [framework for framework, names in NAMES.items() if key in names]:
        return f"a key of {', '.join(theirs)} that nothing here takes the place of"
    for candidates in (here, tuple(everywhere)):
        if match := difflib.get_close_matches(key, candidates, n=1):
            return _did_you_mean(match[0] if match[0] in here else everywhere[match[0]][0], parent)
    if not here:  # below a section of another framework
        return (
            f"no knob of that name; {FOREIGN.get(parent, parent)} has most of what is in {parent}"
        )
    return f"known keys here: {', '.join(here)}"


def suggest_value(value: object, allowed: Sequence[str]) -> str:
    """`; did you mean 'in_batch'?`, or nothing if no allowed value is close."""
    match = difflib.get_close_matches(str(value).lower().replace("-", "_"), allowed, n=1)
    return f"; did you mean '{match[0]}'?" if match else ""


def _renamed(key: str, parent: str) -> str:
    """Ours for a key of another framework."""
    means = f" It is {MEANS[key]}" if key in MEANS else ""
    return _did_you_mean(ELSEWHERE[key], parent) + means


def _did_you_mean(name: str, parent: str) -> str:
    """The suggestion, by its last part where that is enough."""
    prefix = f"{parent}." if parent else ""
    return f"did you mean '{name.removeprefix(prefix)}'?"
