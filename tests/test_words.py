"""Numbers as people read them."""

from __future__ import annotations

import pytest

from vlmpack.words import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0123, "12.3 ms"),
        (7.41, "7.4 s"),
        (59.96, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7620, "2 h 07 min"),
        (47.99 * 3600, "47 h 59 min"),
        (76 * 3600, "3.2 days"),
    ],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
