"""Figures of a plan, for tests of what follows from them."""

from __future__ import annotations

from typing import Any

from vlmpack.forecast.figures import ModeFigures


def mode_of(**values: Any) -> ModeFigures:
    """Figures of a small plan; `values` in place of some."""
    given = {
        "name": "in_batch", "is_recipes": True, "is_estimated": False, "micro_batch_size": 16,
        "steps": 10, "counts_rows": False, "samples": 160, "rows": 10, "tokens": 9000,
        "held_tokens": 9000, "slots": 9000, "empty_rows": 0, "row_tokens": 0,
        "vision_patches": 100, "compute": 1.0,
        "max_row_slots": 1000, "max_row_patches": 500, "mean_batch_samples": 16.0,
        "mean_batch_tokens": 900.0,
    }  # fmt: skip
    return ModeFigures(**{**given, **values})
