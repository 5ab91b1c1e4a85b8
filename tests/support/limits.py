"""How long a test may take; what it starts is ended a little before, so that it is named."""

from __future__ import annotations

import pytest

SOAK = 3600
"""Seconds of a test of `make soak`, whose launches have more cases; pyproject.toml has others'."""
_now = float(SOAK)


def limit(item: pytest.Item) -> None:
    """Give a test of `make soak` its time."""
    if item.get_closest_marker("soak"):
        item.add_marker(pytest.mark.timeout(SOAK))


def start(item: pytest.Item) -> None:
    """Remember what the test that begins may take."""
    global _now
    _now = SOAK if item.get_closest_marker("soak") else float(item.config.getini("timeout"))


def of_a_launch() -> float:
    """Seconds for what the running test starts: five sixths of its own."""
    return _now * 5 / 6
