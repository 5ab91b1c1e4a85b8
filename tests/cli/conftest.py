"""Rows to inspect; read-only."""

from __future__ import annotations

from support.inspected import inspect_recipe, inspect_settings

__all__ = ["inspect_recipe", "inspect_settings"]
