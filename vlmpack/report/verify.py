"""The table of `vlmpack verify`: one line a check, every cell text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from vlmpack.proof.measure import FEWEST_LABELS
from vlmpack.proof.verify import Check, Verification

COLUMNS = ("", "check", "found", "bound", "unpacked", "")
"""Heads of the columns; `unpacked` is what the unpacked run differs from itself by."""

MARKS = {
    "pass": "pass",
    "fail": "FAIL",
    "shown": "-",
    "too few": "too few",
    "not shown": "not shown",
}


def table_rows(verification: Verification) -> list[tuple[str, ...]]:
    """As many cells as `COLUMNS` a check. Names of parameters are their last parts."""
    return [
        (
            MARKS[check.status],
            check.name,
            _figure(check.measured, exact=check.bound == 0.0),
            _bound(check),
            _figure(check.noise),
            re.sub(r"(?<=, worst )(?:\w+\.)+((?:\w+\.){4}\w+ )", r"\1", check.detail),
        )
        for check in verification.checks
    ]


def head(verification: Verification) -> list[str]:
    """What was verified, before the table."""
    facts = verification.facts
    model = f"model     {facts['model']}"
    if facts.get("tiny"):
        model += f": A TINY MODEL of its architecture; {facts['weights']}"
    samples: Sequence[dict[str, int]] = facts["samples"]
    tokens = sum(sample["tokens"] for sample in samples)
    images = sum(sample["images"] for sample in samples)
    labels = sum(sample["labels"] for sample in samples)
    engine = facts["engine"]
    num_wanted = facts["samples_wanted"]
    more = (
        f"          more than the {num_wanted} of --samples: bfloat16 is judged over "
        f"{FEWEST_LABELS:,} label tokens, so samples are taken until they have so many"
    )
    return [
        model,
        f"samples   {len(samples)} of data.train: {tokens:,} tokens, {labels:,} of them labels, "
        f"{images} image{'s' if images != 1 else ''}",
        *([more] if len(samples) > num_wanted else []),
        f"unpacked  {engine['stock']}, one sample at a time",
        f"packed    mode {facts['mode']}, {engine['engine']}, {_processes(engine)}, "
        f"attention {engine['attention'].partition(' (')[0]}",
        f"computed  in {facts['dtype']} on {engine['device']}, {facts['seconds']:.0f} s",
    ]


def _processes(engine: Mapping[str, str]) -> str:
    count, _, how = engine["processes"].partition(" ")
    return "1 process" if count == "1" else f"{count} processes {how}"


def _figure(value: float | None, *, exact: bool = False) -> str:
    if value is None:
        return ""
    if value == 0.0 and exact:
        return "0"
    return f"{value:.2f}" if 0.1 <= value < 100 else f"{value:.1e}"


def _bound(check: Check) -> str:
    if check.bound is None:
        return ""
    return "0" if check.bound == 0.0 else f"{check.bound:.2g}"
