"""What a run minimises, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from vlmpack.recipe.sources import Section

OBJECTIVES: Mapping[str, str] = {
    "sft": "vlmpack.training.objective:SFT",
}
"""Name in a recipe -> where the value is: module:name, imported where it is trained."""


def _known(name: str) -> str:
    if name not in OBJECTIVES:
        raise PydanticCustomError("literal_error", "unknown objective")
    return name


ObjectiveName = Annotated[
    str, AfterValidator(_known), WithJsonSchema({"type": "string", "enum": [*OBJECTIVES]})
]


class ObjectiveSection(Section):
    """What training minimises."""

    name: ObjectiveName = "sft"
    """`sft`: the cross entropy of the label tokens, averaged over those of a global batch."""
