"""What differs between two runs, and whether their losses may be compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from vlmpack.report.compare.read import ComparedRun
from vlmpack.words import counted

MAX_ROWS = 60
_OF_THE_FOLDER = ("run_dir", "logging.name")
"""Keys of a recipe that differ between any two runs."""
_READ_AS_TOKENS = ("tokenizer", "chat_template", "added_tokens", "special_tokens")
"""How the entries of model.json begin that say what a label token is."""


class Difference(NamedTuple):
    """A value that differs, as text; "" where a run has none."""

    name: str
    a: str
    b: str


def not_comparable(a: ComparedRun, b: ComparedRun) -> list[str]:
    """Why their losses are not those of the same thing; empty where they are."""
    reasons = []
    objective = [
        f"{name} {x} and {y}"
        for name, x, y in identity_differences(a, b)
        if name.startswith("objective.")
    ]
    units = tuple(run.files.unit for run in (a, b))
    # With both identities and no such difference a run of before lacks its divisor's column.
    if units[0] != units[1] and (objective or None in (a.identity, b.identity)):
        objective.append(f"the loss of A is per {units[0]}, that of B per {units[1]}")
    if objective:
        reasons.append(f"another objective: {'; '.join(objective)}")
    if _other_data(a, b):
        reasons.append(_other_data(a, b))
    if a.model is not None and b.model is not None:
        tokens = [
            one.name
            for one in _changed(a.model.processor, b.model.processor)
            if one.name.startswith(_READ_AS_TOKENS)
        ]
        if tokens:
            reasons.append(
                f"another tokenizer or chat template ({', '.join(tokens[:3])}): a label token is "
                "not the same thing in both"
            )
    return reasons


def cautions(a: ComparedRun, b: ComparedRun) -> list[str]:
    """What a reader of the figures should know, and what the folders do not say."""
    lines = []
    for run in (a, b):
        lacks = [
            name
            for name, value in (
                ("identity.json", run.identity),
                ("recipe.yaml", run.recipe),
                ("model.json", run.model),
                ("shards.json", run.shards),
            )
            if value is None
        ]
        if lacks:
            lines.append(f"{run.label} has no {', '.join(lacks)}: not compared")
        if run.num_missing:
            missing = counted(run.num_missing, "step")
            lines.append(
                f"{run.label} has no row for {missing}: it has seen more samples than are counted"
            )
        if not run.files.result:
            lines.append(f"{run.label} has no result.json: it is not finished")
    if a.model is not None and b.model is not None and a.model.weights != b.model.weights:
        lines.append("the runs begin with other weights")
    return lines


def identity_differences(a: ComparedRun, b: ComparedRun) -> list[Difference]:
    """What decides which numbers are learned; [] where one has no identity.json."""
    if a.identity is None or b.identity is None:
        return []
    return _changed(a.identity, b.identity)


def recipe_differences(a: ComparedRun, b: ComparedRun) -> list[Difference]:
    """The other keys of recipe.yaml."""
    if a.recipe is None or b.recipe is None:
        return []
    known = {one.name for one in identity_differences(a, b)}
    found = _changed(a.recipe, b.recipe)
    return [one for one in found if one.name not in known and one.name not in _OF_THE_FOLDER]


def model_differences(a: ComparedRun, b: ComparedRun) -> list[Difference]:
    """Config and processor of the model folders, and how many weights differ."""
    if a.model is None or b.model is None:
        return []
    weights = _changed(a.model.weights, b.model.weights)
    found = [*_changed(a.model.config, b.model.config)]
    found += _changed(a.model.processor, b.model.processor)
    if weights:
        tensors = counted(len(weights), "tensor")
        found.insert(
            0, Difference(f"weights: {tensors} differ, {weights[0].name} first", *weights[0][1:])
        )
    return found


def machine_differences(a: ComparedRun, b: ComparedRun) -> list[Difference]:
    """What computed: engine, kernels, versions."""
    parts: list[dict[str, Any]] = []
    for run in (a, b):
        flat: dict[str, Any] = {}
        for section in ("engine", "versions"):
            value = run.files.result.get(section)
            for name, inner in value.items() if isinstance(value, Mapping) else ():
                flat[f"{section}: {name}"] = inner
        parts.append(flat)
    return _changed(*parts) if all(parts) else []


def _other_data(a: ComparedRun, b: ComparedRun) -> str:
    """Which shards differ; without their lists, which paths of the identity do."""
    if a.shards is not None and b.shards is not None:
        only = (len(a.shards - b.shards), len(b.shards - a.shards))
        if not any(only):
            return ""
        return f"other training data: {only[0]} shards of A alone, {only[1]} of B alone"
    paths = [
        f"{one.name} {one.a} and {one.b}"
        for one in identity_differences(a, b)
        if one.name.startswith("data.train.") and one.name.endswith(".path")
    ]
    return f"other training data: {'; '.join(paths)}" if paths else ""


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    return [
        Difference(key, _text(a, key), _text(b, key))
        for key in [*a, *(key for key in b if key not in a)]
        if not (key in a and key in b and a[key] == b[key])
    ]


def _text(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return ""
    value = values[key]
    return json.dumps(value) if value is None or isinstance(value, bool | list) else str(value)
