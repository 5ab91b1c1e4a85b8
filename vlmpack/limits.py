"""How much of anything is read. One table: who scans a file and who reads it again hold the same.

Above a limit is a named error, which says what was found and what is allowed. docs/data.md has the
table in words; a test compares the two.
"""

from __future__ import annotations

MAX_RECORD_KEYS = 4096
"""Keys of a record, columns of a table."""

LONGEST_SECONDS = 1e6
"""A time beyond it is no time of a video's frame."""

MAX_RECIPE_BYTES = 1_000_000
"""A larger file is not a recipe."""

MAX_RECIPE_DEPTH = 16
"""Nesting beyond this is not a recipe."""

MAX_RECIPE_PROBLEMS = 200
"""Problems of one recipe that are listed."""
