"""Templates that write the day: one date for all that they write.

    {{ strftime_now("%d %b %Y") }}        in the template; transformers gives it the clock
    {% macro strftime_now(format) %}...   written before it: gives it the run's date

A macro, since transformers hands templates plain data alone, no functions; and one in the template
needs nothing of transformers' insides. The time of day is midnight.
"""

from __future__ import annotations

import json
import re
from datetime import date, datetime, time
from functools import cache
from pathlib import Path
from typing import Any

from vlmpack.errors import ModelError
from vlmpack.file_format import EXPORT_NOTE
from vlmpack.model_folder.content import PROCESSOR_FILES
from vlmpack.whole_file import read_json, regular_bytes

NOTE = "vlmpack-date.json"
"""In an exported folder: the date that its conversations were trained with."""

_COMMENT = re.compile(rb"\{#.*?#\}", re.DOTALL)

_DIRECTIVES = (
    *(f"%{letter}" for letter in "aAbBcCdDeFgGhHIjmMnprRStTuUVwWxXyYzZ"),
    *(f"%-{letter}" for letter in "dmHIMSjy"),
    "%f",
)
_PERCENT = "\U000f1e04"
"""Stands for `%%` while the directives are replaced."""


def today() -> date:
    """The day that the clock says."""
    return date.today()


def reads_clock(folder: Path) -> bool:
    """Whether the chat template of a model folder writes the day or the time."""
    for name in PROCESSOR_FILES:
        path = folder / name
        may_hold = name.startswith("chat_template") or name.endswith("r_config.json")
        if may_hold and path.is_file():
            content = regular_bytes(path)
            if b"strftime_now" in content and b"strftime_now" in _COMMENT.sub(b"", content):
                return True
    return False


@cache
def with_date(template: str, day: date) -> str:
    """A template whose `strftime_now` is that of a date; what it writes is else the same.

    Args:
        template: Jinja, as transformers renders it.
    """
    moment = datetime.combine(day, time())
    expression = f"format.replace('%%', '{_PERCENT}')"
    for directive in _DIRECTIVES:
        expression += f".replace({directive!r}, {moment.strftime(directive)!r})"
    expression += f".replace('{_PERCENT}', '%')"
    # The plus keeps a line break that the template begins with.
    return f"{{% macro strftime_now(format) %}}{{{{ {expression} }}}}{{% endmacro +%}}{template}"


def write_note(folder: Path, day: date | None) -> None:
    """Say in an exported folder which date its model was trained with; `vlmpack generate` takes it.

    Args:
        folder: the export's.
        day: None for a template that does not read the clock: nothing is written.
    """
    if day is None:
        return
    note = {
        "date": day.isoformat(),
        "meaning": "The chat template writes the current date (strftime_now). In all conversations "
        "that this model was finetuned on it was this one.",
    }
    (folder / NOTE).write_text(
        json.dumps(EXPORT_NOTE.mark(note), indent=2) + "\n", encoding="utf-8"
    )


def noted_date(folder: Path) -> date | None:
    """The date of an exported folder's note; None where there is none, or none that can be read."""
    try:
        note: Any = read_json(folder / NOTE)
        EXPORT_NOTE.take(note, folder / NOTE, ModelError)
        return date.fromisoformat(note["date"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
