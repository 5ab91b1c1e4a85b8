"""Every figure of a plan as plain JSON values, those that follow from others included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from vlmpack.file_format import PLAN
from vlmpack.forecast.figures import RunPlan

"""Raised when a name goes or changes its meaning."""


def as_json(plan: RunPlan) -> dict[str, Any]:
    """The plan, by the names of `vlmpack.forecast.figures`."""
    content: dict[str, Any] = _value(plan)
    content.pop("mode")  # one of the modes, by is_recipes
    return PLAN.mark(content)


def _value(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        names += [name for name, kind in vars(type(value)).items() if isinstance(kind, property)]
        return {name: _value(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(name): _value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_value(item) for item in value]
    return value
