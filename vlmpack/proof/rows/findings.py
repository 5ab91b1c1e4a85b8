"""What the checks of a row share."""

from __future__ import annotations

NO_LOSS = -100
"""The label of a slot without loss: said here again, so that a wrong constant elsewhere shows."""


class Broken(Exception):
    """A property that does not hold: what was found, as text."""


def many(count: int, name: str) -> str:
    """1 sample, 2 samples."""
    return f"{count:,} {name}" + ("" if count == 1 else "s")
