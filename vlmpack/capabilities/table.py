"""The capability table: every served model_type x engine x feature, for given package versions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlmpack.capabilities.config import PREDICTION_LAYERS
from vlmpack.capabilities.limits import (
    ENGINE_LIMITS,
    ENGINES,
    FEATURES,
    MCORE_FEATURES,
    NO_EXPERTS,
    Engine,
    Feature,
    Limit,
)
from vlmpack.capabilities.refused import IMAGES, TEXT, Swept
from vlmpack.capabilities.served import SERVED, ServedModel, generic_line
from vlmpack.capabilities.versions import version_limit


@dataclass(frozen=True, slots=True)
class Row:
    """What can be done with one model_type.

    Args:
        cells: by engine and feature, why not; None where it can be done.
    """

    model_type: str
    model: ServedModel
    cells: Mapping[Engine, Mapping[Feature, Limit | None]]


def capabilities(versions: Mapping[str, str | None]) -> tuple[Row, ...]:
    """A row for each model_type that can be trained. The version of a missing package is None."""
    return tuple(row_of(model_type, versions) for model_type in SERVED)


def row_of(model_type: str, versions: Mapping[str, str | None]) -> Row:
    """The row of a model_type; that of the generic family where no family of ours serves it."""
    model = SERVED.get(model_type) or generic_line(model_type)
    cells = {
        engine: {feature: why_not(model, engine, feature, versions) for feature in FEATURES}
        for engine in ENGINES
    }
    return Row(model_type, model, cells)


def why_not(
    model: ServedModel, engine: Engine, feature: Feature, versions: Mapping[str, str | None]
) -> Limit | None:
    """Why a feature cannot be had, the most lasting reason first; None where it can."""
    if feature == "EP" and not model.has_experts:
        return NO_EXPERTS
    if feature in model.limits:
        return model.limits[feature]
    if feature in MCORE_FEATURES and "mcore" not in model.engines:
        return model.only_on_mcore
    if feature in ENGINE_LIMITS[engine]:
        return ENGINE_LIMITS[engine][feature]
    if engine not in model.engines:
        return model.not_on_mcore
    packages = ["transformers"]
    if engine == "mcore":
        packages.append("megatron-core")
    if feature == "LoRA":
        packages.append("peft")
    limits = (version_limit(name, versions.get(name)) for name in packages)
    return next((limit for limit in limits if limit is not None), None)


_SUPERSCRIPTS = str.maketrans(
    "0123456789", "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
)


@dataclass(frozen=True, slots=True)
class TextTable:
    """The table, ready to be printed.

    Args:
        rows: cells of each family: its name, its model_type in config.json, and for each feature
            the engines that have it, `no`, or `-` where it does not apply.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def text_table(rows: Sequence[Row]) -> TextTable:
    """All families, a line each."""
    numbers: dict[str, int] = {}
    lines = tuple(
        (row.model.title, row.model_type, *(_cell(row, feature, numbers) for feature in FEATURES))
        for row in rows
    )
    notes = [f"{_mark(number)} {reason}" for reason, number in numbers.items()]
    notes += [
        f"{row.model.title}: model.attention {' or '.join(only.names)} alone, since {only.reason}"
        for row in rows
        if (only := row.model.attention) is not None
    ]
    notes.append(prediction_note(rows))
    return TextTable(("family", "model_type", *FEATURES), lines, tuple(notes))


def narrowed(table: TextTable) -> TextTable:
    """The table with the features that have the same cells in every row in one column."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in zip(table.columns, *table.rows, strict=True):
        alike.setdefault(tuple(cells), []).append(name)
    return TextTable(
        columns=tuple("\n".join(names) for names in alike.values()),
        rows=tuple(zip(*alike, strict=True)),
        notes=table.notes,
    )


def prediction_note(rows: Sequence[Row]) -> str:
    """The treatment of multi-token prediction."""
    where = ", ".join(
        f"{row.model.title} ({row.model.prediction})" for row in rows if row.model.prediction
    )
    return (
        f"multi-token prediction is kept, not trained: an export has its tensors as the source has "
        f"them, bit for bit, in any model whose config.json counts its layers "
        f"({', '.join(PREDICTION_LAYERS)}), and in {where}"
    )


def _generalised(reason: str) -> str:
    """A reason of the sweep without the name of the class that it was met in."""
    return _NAMED.sub("", reason)


_NAMED = re.compile(r" \(\w+ImageProcessor\)(?= for torchvision)")


def proven_names(words: Mapping[str, Swept]) -> tuple[str, ...]:
    """The model_types that the generic family trains, by the sweep."""
    return tuple(name for name, word in words.items() if word.word == "proven")


def refused_lines(words: Mapping[str, Swept]) -> tuple[tuple[str, str], ...]:
    """(model_types, reason) of those that are refused; one line where a reason is shared."""
    lines: dict[str, list[str]] = {}
    for name, word in words.items():
        if word.word == "refused":
            lines.setdefault(_generalised(word.reason), []).append(name)
    return tuple((", ".join(names), reason) for reason, names in lines.items())


def markdown(table: TextTable, versions: Mapping[str, str | None]) -> str:
    """The table for docs/families.md."""
    head = " | ".join(table.columns)
    lines = [f"| {head} |", "|" + "---|" * len(table.columns)]
    lines += [f"| {' | '.join(row)} |" for row in table.rows]
    lines += ["", f"With {versions_text(versions)}. `both`: the engines `hf` and `mcore`."]
    lines += ["", *(f"- {note}" for note in table.notes)]
    lines += ["", PROVEN]
    for title, words in KINDS.items():
        names = ", ".join(f"`{name}`" for name in proven_names(words))
        lines += ["", f"{title}:", "", "| word | model_type | why |", "|---|---|---|"]
        lines += [f"| proven | {names} | |"]
        lines += [f"| refused | {names} | {reason} |" for names, reason in refused_lines(words)]
    return "\n".join(lines) + "\n"


PROVEN = (
    "Classes that no family of ours serves, as the sweep left them. The generic family trains "
    "the proven ones on the engine `hf`. Each was verified on a tiny random model. Yours is "
    "verified before its first step."
)

KINDS: Mapping[str, Mapping[str, Swept]] = {
    "With images": IMAGES,
    "Language models alone": TEXT,
}
"""Heading -> words."""

START, END = "<!-- families -->", "<!-- /families -->"
"""What stands around the table in a Markdown file."""


def with_block(text: str, block: str) -> str | None:
    """A Markdown text with another table between the marks; None where it has no such marks."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    return f"{before}{start}\n{block}{end}{after}" if start and end else None


def model_table(row: Row) -> tuple[tuple[str, ...], ...]:
    """(feature, on hf, on mcore) of one model, with the reasons."""
    return tuple(
        (
            feature,
            *("yes" if (why := row.cells[e][feature]) is None else f"no: {why}" for e in ENGINES),
        )
        for feature in FEATURES
    )


def versions_text(versions: Mapping[str, str | None]) -> str:
    """`transformers 5.24.0, no peft`."""
    names = [f"{name} {version}" for name, version in versions.items() if version is not None]
    missing = [f"no {name}" for name, version in versions.items() if version is None]
    return ", ".join(names + missing)


def _cell(row: Row, feature: Feature, numbers: dict[str, int]) -> str:
    """The engines that can, and the numbers of the reasons why others cannot."""
    why = {engine: row.cells[engine][feature] for engine in ENGINES}
    if set(why.values()) == {NO_EXPERTS}:
        return "-"
    can = [engine for engine, limit in why.items() if limit is None]
    if len(can) == len(ENGINES):
        return "both"
    reasons = _reasons(why)
    marks = sorted(numbers.setdefault(reason, len(numbers) + 1) for reason in reasons)
    return (can[0] if can else "no") + _mark(*marks)


def _reasons(why: Mapping[Engine, Limit | None]) -> tuple[str, ...]:
    """Each with its engine, unless it is that of all, or names one itself."""
    limits = {limit for limit in why.values() if limit is not None}
    if limits == set(why.values()) and len(limits) == 1:
        return (str(*limits),)
    return tuple(
        str(limit) if "model.backend" in str(limit) else f"{engine}: {limit}"
        for engine, limit in why.items()
        if limit is not None
    )


def _mark(*numbers: int) -> str:
    return " ".join(map(str, numbers)).translate(_SUPERSCRIPTS)
