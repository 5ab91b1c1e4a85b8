"""Rows to inspect; read-only."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure
from support.inspected import inspect_recipe, inspect_settings, opened_row

__all__ = ["inspect_recipe", "inspect_settings", "opened_row"]


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are laid out and not painted: for tests of the words in them and of the page."""
    painted = Figure.savefig

    def savefig(self: Figure, data: Any, **how: Any) -> None:
        if how["format"] != "png":
            painted(self, data, **how)

    monkeypatch.setattr(Figure, "savefig", savefig)
