"""What a recipe says to the chat template: the date, variables beside each record's own, and the
special tokens that texts may spell."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, WithJsonSchema

from vlmpack.recipe.sources import as_tuple


def _iso_date(text: str) -> str:
    """A date as ISO 8601 has it, dashes included."""
    if datetime.date.fromisoformat(text).isoformat() != text:
        raise ValueError(text)
    return text


IsoDate = Annotated[
    str, AfterValidator(_iso_date), WithJsonSchema({"type": "string", "format": "date"})
]


class _Variables(dict[str, JsonValue]):
    """Variables by name, which nobody changes: recipes are hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


def _set(variables: Mapping[str, JsonValue]) -> _Variables:
    """Those with a value: an override takes one out with null."""
    return _Variables({name: value for name, value in variables.items() if value is not None})


TemplateVariables = Annotated[
    dict[str, JsonValue],
    AfterValidator(_set),
    WithJsonSchema({"type": "object", "additionalProperties": True}),
]
"""Name -> value; which values may be is a rule (`data_rules.py`), which names the template says."""

SpecialTokens = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(as_tuple),
    AfterValidator(lambda named: tuple(sorted(set(named)))),
]
"""In any order, once each; which they may be is the tokenizer's and the template's to say."""
