"""Which names of a recipe stand for what a program hands over; `registered` says what they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vlmpack.addresses import registered_name
from vlmpack.recipe.schema import Recipe


class Registered(NamedTuple):
    """A value that a recipe names.

    Args:
        key: where, as messages say it.
        argument: of `vlmpack.finetune`, what it is looked for in.
        name: without `python:`.
    """

    key: str
    argument: str
    name: str


def registered_in(recipe: Recipe) -> list[Registered]:
    """All of a recipe's, in its own order."""
    named = ((key, argument, registered_name(text)) for key, argument, text in _texts(recipe))
    return [Registered(key, argument, name) for key, argument, name in named if name is not None]


def _texts(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    data = recipe.data
    for split, sources in data.splits().items():
        for source in sources:
            yield f"data.{split}", "sources", source.path
            if isinstance(source.columns, str):
                yield f"data.{split}.columns", "sources", source.columns
    if isinstance(data.columns, str):
        yield "data.columns", "sources", data.columns
    yield "objective.name", "objective", recipe.objective.name
    for name in recipe.evaluation.metrics:
        yield "evaluation.metrics", "metrics", name
