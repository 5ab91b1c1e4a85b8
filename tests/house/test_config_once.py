"""A section of the recipe is the configuration of the layer that takes it: no other class says the
same fields once more, with defaults, bounds and words of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from support.shards import ROOT

PACKAGE = ROOT / "vlmpack"
SAME_FIELDS = 3
"""So many names in common, and a class is a section's twin."""
PLAIN = ("recipe", "packing", "attention", "distributed")
"""The sections' own room, and those that take plain arguments."""
NO_SETTINGS = {
    "data/packs/manifest.py Manifest": "a file that is compared with the recipe",
    "build/data.py DataSpec": "what each split is opened from",
    "run/splits.py Splits": "the splits themselves, opened",
    "encode/settings.py EncoderSettings": "of an encoder, which programs make without a recipe",
    "cli/convert.py ConvertOptions": "the options of a command without a recipe",
    "cli/options.py ReadOptions": "the options of commands that work without a recipe too",
    "families/coordinates.py CoordinateRule": "of a family, which its own file says",
    "encode/fingerprint.py EncoderFacts": "what a digest is made of",
}
WHOLE = "Recipe"
"""Its fields are sections; whoever holds a model and a run folder repeats none."""

TWINS = """
@dataclass(frozen=True)
class StoreSettings:
    endpoint: str | None = None
    region: str | None = None
    max_tries: int = 5

class ErrorRules(BaseModel):
    transport: str = "skip"
    integrity: str = "skip"
    decode: str = "skip"

@dataclass
class Stranger:
    endpoint: str
    region: str
"""


def records_in(text: str) -> Iterator[tuple[str, set[str]]]:
    """(name, fields) of every class whose body annotates some: dataclasses, models, tuples."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            targets = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
            if fields := {target.id for target in targets if isinstance(target, ast.Name)}:
                yield node.name, fields


def records_of(*rooms: str, but: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """The records of these rooms, or of all `but` some, by file and name."""
    return {
        f"{path.relative_to(PACKAGE)} {name}": fields
        for path in sorted(PACKAGE.rglob("*.py"))
        if (room := path.relative_to(PACKAGE).parts[0]) not in but and (not rooms or room in rooms)
        for name, fields in records_in(path.read_text(encoding="utf-8"))
    }


def twins(records: dict[str, set[str]]) -> list[tuple[str, str]]:
    """(record, section) where one repeats the other."""
    sections = {place.partition(" ")[2]: names for place, names in records_of("recipe").items()}
    assert {"StorageSection", "DataSection", "OnErrorSection", WHOLE} <= sections.keys()
    return [
        (place, section)
        for place, fields in records.items()
        for section, names in sections.items()
        if section != WHOLE and len(fields & names) >= SAME_FIELDS
    ]


@pytest.mark.slow
def test_no_class_repeats_a_section() -> None:
    records = records_of(but=PLAIN)
    assert len(records) > 200 and records.keys() >= NO_SETTINGS.keys()
    found = twins({place: fields for place, fields in records.items() if place not in NO_SETTINGS})
    assert found == [], "let the consumer take the section"


def test_a_twin_is_caught() -> None:
    found = twins(dict(records_in(TWINS)))
    assert found == [("StoreSettings", "StorageSection"), ("ErrorRules", "OnErrorSection")]
