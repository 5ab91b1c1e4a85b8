"""What an audit finds, in numbers and in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

NAMED = 5
"""Samples that a message names at most."""

MAX_PROBLEMS = 50
"""Problems that are listed; the rest is counted."""


@dataclass(slots=True)
class EpochCount:
    """One epoch in numbers of samples. `lost` is neither trained nor skipped nor to come."""

    epoch: int
    planned: int = 0
    trained: int = 0
    skipped: int = 0
    pending: int = 0
    lost: int = 0


@dataclass(slots=True)
class Audit:
    """What was found.

    Args:
        batches: global batches that are trained, by the record.
        launches: starts of the run.
        epochs: those that were begun.
        problems: one line each; empty for a run that is proven.
        notes: what is no problem, but limits what could be proven.
        num_problems: all of them, those above MAX_PROBLEMS too.
    """

    batches: int = 0
    launches: int = 0
    epochs: list[EpochCount] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_problems: int = 0

    def fault(self, text: str) -> None:
        """Add a problem."""
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text)

    def as_json(self) -> dict[str, Any]:
        """The findings as `--json` prints them."""
        return {"proven": not self.num_problems, **asdict(self)}


def listed(names: Iterable[object]) -> str:
    shown = [str(name) for name in names]
    more = f" and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    return ", ".join(shown[:NAMED]) + more
