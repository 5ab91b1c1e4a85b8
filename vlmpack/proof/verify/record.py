"""What was found, as JSON and as words."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vlmpack.proof.verify.run import Verification
from vlmpack.whole_file import write_atomically

EQUAL = "packed equals unpacked"


def as_json(found: Verification) -> dict[str, Any]:
    """Every figure; numbers that JSON does not have are words."""
    return {
        "passes": found.passes,
        "conclusion": conclusion(found),
        **found.facts,
        "checks": [
            {name: _number(value) for name, value in asdict(check).items()}
            for check in found.checks
        ],
    }


def _number(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def file_name(*, tiny: bool) -> str:
    """A tiny model's figures do not take the place of the model's own."""
    return "verify-tiny.json" if tiny else "verify.json"


def write_verification(found: Verification, folder: Path) -> Path:
    """Write verify.json, or verify-tiny.json beside it; the file appears whole.

    Returns:
        Its path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(tiny=bool(found.facts.get("tiny")))
    write_atomically(path, json.dumps(as_json(found), indent=1) + "\n")
    return path


def conclusion(found: Verification) -> str:
    """The last line: that packed equals unpacked, or what differs and what to look at."""
    if found.passes:
        unjudged = [f"{c.name} ({c.detail})" for c in found.checks if c.status == "too few"]
        return (
            EQUAL
            + (" (of the tiny model)" if found.facts.get("tiny") else "")
            + (f" in what was judged; too few data for {'; '.join(unjudged)}" if unjudged else "")
        )
    lines = [f"{check.name} ({check.sentence})" for check in found.failed]
    count = f"{len(lines)} check{'s'[: len(lines) > 1]}"
    return f"packed differs from unpacked in {count}: {'; '.join(lines)}"
