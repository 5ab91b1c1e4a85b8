"""This version, where no package's metadata is needed to know it."""

from __future__ import annotations

__version__ = "0.1.0"
