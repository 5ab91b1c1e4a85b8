"""JSON in which no key stands twice in an object: of two values Python keeps the last, unsaid. And
the text of a JSON number, for answers."""

from __future__ import annotations

import json
import math
from itertools import zip_longest
from typing import Any


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        # A dict keeps the order of first places, so the two part at the first twin.
        twin = next(name for (name, _), own in zip_longest(pairs, found) if name != own)
        raise ValueError(f"the key {twin[:60]!r} stands twice in one object; expected once")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_each_once)


def parse_json(text: str) -> Any:
    """The value.

    Raises:
        ValueError: no JSON, or a key twice in one object.
        RecursionError: nested too deeply.
    """
    return _DECODER.decode(text)


def number_text(value: object) -> object:
    """A number or a boolean as the text that JSON has for it; any other value as it is, NaN and the
    infinities among them, which JSON does not have."""
    if isinstance(value, float):
        return json.dumps(value) if math.isfinite(value) else value
    return json.dumps(value) if isinstance(value, int) else value
