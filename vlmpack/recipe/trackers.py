"""Which experiment trackers that a recipe asks for are not installed here."""

from __future__ import annotations

from importlib.util import find_spec

from vlmpack.errors import RecipeError
from vlmpack.recipe.schema import LoggingSection

DEFAULT = "tensorboard"
"""Nobody has to ask for it, so nothing is refused for want of it."""


def absent_trackers(logging: LoggingSection) -> tuple[str, ...]:
    """Those whose package Python does not find; each is imported under the tracker's own name."""
    return tuple(name for name in logging.trackers if name != DEFAULT and find_spec(name) is None)


def trackers_advice(names: tuple[str, ...]) -> str:
    """What is wrong and what to do."""
    packages = " ".join(name.replace("_", "-") for name in names)
    return (
        f"logging.trackers asks for {', '.join(names)}, which is not installed here: "
        f"pip install {packages}, or take it out (metrics.jsonl has every figure)"
    )


def check_trackers(logging: LoggingSection) -> None:
    """As a launch, of a recipe that is checked here.

    Raises:
        RecipeError: the package of a tracker is not here.
    """
    if names := absent_trackers(logging):
        raise RecipeError([trackers_advice(names)])
