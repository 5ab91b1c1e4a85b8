"""Names of a recipe that stand for what a program hands over: `python:NAME`.

A recipe is data and never says where code lies. It may name what `vlmpack.finetune(recipe,
sources=..., objective=..., metrics=...)` was called with; on the command line there is nothing of
that name, and a launch says so before it reads anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from pydantic_core import PydanticCustomError

from vlmpack.addresses import registered_name


def one_of(known: Collection[str]) -> Callable[[str], str]:
    """A validator of a name: a known one, or `python:NAME`."""

    def check(name: str) -> str:
        if name not in known and registered_name(name) is None:
            raise PydanticCustomError("literal_error", "unknown name")
        return name

    return check
