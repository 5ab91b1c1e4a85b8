"""Numbers and their nouns, for messages."""

from __future__ import annotations


def counted(count: int, one: str, many: str | None = None) -> str:
    """1 sample, 1,234 samples.

    Args:
        count: how many.
        one: the noun.
        many: its plural; None: with an s.
    """
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
