"""A section of the recipe is the configuration of the layer that takes it: no other class says the
same fields once more, with defaults, bounds and words of its own."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator

from pydantic import BaseModel

import vlmpack

SAME_FIELDS = 3
"""So many names in common, and a class is a section's twin."""
ROOMS = ("storage", "data", "encode", "families", "convert", "build")
WRITTEN = {"vlmpack.data.packs.manifest.Manifest"}
"""Files that keep what a recipe said: compared with the recipe, never read in its place."""


def field_names(found: type) -> set[str]:
    if issubclass(found, BaseModel):
        return set(found.model_fields)
    return {field.name for field in dataclasses.fields(found)} if is_record(found) else set()


def is_record(found: type) -> bool:
    return dataclasses.is_dataclass(found) or issubclass(found, BaseModel)


def records_of(room: str) -> Iterator[type]:
    """The dataclasses and models that the modules of a room define."""
    package = importlib.import_module(f"{vlmpack.__name__}.{room}")
    names = [item.name for item in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    for name in (package.__name__, *names):
        for _, found in inspect.getmembers(importlib.import_module(name), inspect.isclass):
            if found.__module__ == name and is_record(found):
                yield found


def twins(records: list[type]) -> list[str]:
    """Which of them repeat a section, and in what."""
    sections = [found for found in records_of("recipe") if field_names(found)]
    return [
        f"{record.__module__}.{record.__qualname__} repeats {section.__name__}: {sorted(same)}"
        for record in records
        for section in sections
        if len(same := field_names(record) & field_names(section)) >= SAME_FIELDS
    ]


def test_no_class_repeats_a_section() -> None:
    records = [record for room in ROOMS for record in records_of(room)]
    assert len(records) > 80, "the rooms were walked"
    kept = [r for r in records if f"{r.__module__}.{r.__qualname__}" not in WRITTEN]
    assert len(kept) == len(records) - len(WRITTEN)
    assert twins(kept) == []


def test_a_twin_is_caught() -> None:
    @dataclasses.dataclass(frozen=True)
    class StoreSettings:
        endpoint: str | None = None
        region: str | None = None
        max_tries: int = 5

    class ErrorRules(BaseModel):
        transport: str = "skip"
        integrity: str = "skip"
        decode: str = "skip"

    @dataclasses.dataclass(frozen=True)
    class Stranger:
        endpoint: str
        region: str

    found = twins([StoreSettings, ErrorRules, Stranger])
    assert [text.partition(": ")[0].rpartition(" ")[2] for text in found] == [
        "StorageSection",
        "OnErrorSection",
    ]
