"""Rows to inspect; read-only."""

from __future__ import annotations

from support.inspected import inspect_recipe, inspect_settings, opened_row

__all__ = ["inspect_recipe", "inspect_settings", "opened_row"]
