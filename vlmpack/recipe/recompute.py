"""What `model.activation_checkpointing` may say, and what old recipes said."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

Recomputed = Literal["none", "selective", "full"] | int
"""What is computed again in the backward pass; a number n: every n-th layer."""


def _in_words(value: object) -> object:
    """Recipes once said true for full and false for none."""
    return ("full" if value else "none") if isinstance(value, bool) else value


Recomputation = Annotated[
    Literal["none", "selective", "full", "auto"] | Annotated[int, Field(ge=1)],
    BeforeValidator(_in_words),
]


def is_recomputed(place: int, value: Recomputed) -> bool:
    """Whether a layer is computed again.

    Args:
        place: of the layer among its stack's, from 0.
        value: of the recipe.
    """
    if isinstance(value, int):
        return (place + 1) % value == 0
    return value != "none"


def described(value: Recomputed) -> str:
    """The recipe's value, for the log and the report."""
    if isinstance(value, int):
        return f"one layer in {value}" if value > 1 else "every layer"
    return {"none": "nothing", "selective": "all but matrix products and attention"}.get(
        value, "every layer"
    )
