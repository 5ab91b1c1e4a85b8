"""CONTRIBUTING's tour of a family names everything that a family's file must say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vlmpack.families.base import Family, ImageRule

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
SECTION = re.compile(r"^## Adding a model family$(.*?)^## ", re.DOTALL | re.MULTILINE)


def members(protocol: type) -> set[str]:
    """Public attributes and methods that a protocol asks for, its own alone."""
    return {
        name
        for name in {*protocol.__annotations__, *vars(protocol)}
        if not name.startswith("_") and name != "protocol_attrs"
    }


@pytest.mark.parametrize("protocol", [Family, ImageRule])
def test_the_tour_names_every_member(protocol: type) -> None:
    found = SECTION.search(CONTRIBUTING.read_text(encoding="utf-8"))
    assert found, "CONTRIBUTING.md has no section 'Adding a model family'"
    named = set(re.findall(r"`(?:FAMILY\.)?(\w+)(?:\([^`]*\))?`", found[1]))
    asked = members(protocol)
    assert len(asked) >= 5, asked
    assert not asked - named, f"not in the tour: {sorted(asked - named)}"
