"""Numbers and their nouns, bytes, times, lists, and what somebody's code raised, for messages."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path


def counted(count: int, one: str, many: str | None = None) -> str:
    """1 sample, 1,234 samples."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def some_of(names: Iterable[object], limit: int = 4) -> str:
    """a, b, c, d and 3 more."""
    each = [str(name) for name in names]
    more = f" and {len(each) - limit} more" if len(each) > limit else ""
    return ", ".join(each[:limit]) + more


def sized(num_bytes: float) -> str:
    """Bytes as GiB, small ones as MiB: 23.5 GiB, 94.6 MiB, 0."""
    if num_bytes < 1 << 30:
        return f"{num_bytes / 2**20:.1f} MiB" if num_bytes else "0"
    return f"{num_bytes / 2**30:,.1f} GiB"


def kind_of(value: object) -> str:
    """What a message calls a value of JSON that is not as expected: a list, an int, missing."""
    names = {type(None): "missing", list: "a list", dict: "an object", str: "a string"}
    if value == []:
        return "an empty list"
    name = type(value).__name__
    article = "an" if name[0] in "aeiou" else "a"
    return names.get(type(value), f"{article} {name}")


def what_is(value: object) -> str:
    """What a message calls a value of Python that is not as expected: an int, a string, None."""
    return "None" if value is None else kind_of(value)


def twice(names: Iterable[str]) -> list[str]:
    """The names that occur more than once, each once, in their order."""
    return [name for name, count in Counter(names).items() if count > 1]


def shape_of(reason: str) -> str:
    """A message without its quoted names and numbers, to compare those of many samples."""
    return re.sub(r"[0-9]+", "0", _QUOTED.sub("''", reason))


_QUOTED = re.compile(r"(?<!\w)(?:'[^']*'|\"[^\"]*\")(?!\w)")  # no apostrophe: the processor's


MAX_NAMES = 1000
"""Names of a folder that a missing one is compared with."""


def meant_path(path: str | os.PathLike[str]) -> str:
    """`; did you mean 'data/train.tar'?` for a path or pattern, where each missing part has a
    similar name in its place; else nothing."""
    nearest, parts = Path(), Path(path).parts
    for part in parts:
        try:
            if (nearest / part).exists() or next(nearest.glob(part), None):
                nearest /= part
                continue
            with os.scandir(nearest) as entries:
                names = {each.name.casefold(): each.name for each in islice(entries, MAX_NAMES)}
        except (OSError, ValueError, NotImplementedError):
            return ""
        near = difflib.get_close_matches(part.casefold(), names, n=1)
        if not near:
            return ""
        nearest /= names[near[0]]
    return "" if nearest == Path(*parts) else f"; did you mean {str(nearest)!r}?"


def indented(lines: Iterable[str]) -> str:
    """The middle of a message that goes on below it: a line each, set in."""
    return "\n".join(f"  {line}" for line in lines)


def raised(error: BaseException) -> str:
    """An exception of a program's code in one line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    at = f" ({frames[-1].filename.rpartition('/')[2]}, line {frames[-1].lineno})" if frames else ""
    words = " ".join(str(error).split())[:300]
    return f"raised {type(error).__name__}{': ' + words if words else ''}{at}"


def unfit_signature(function: Callable[..., object], count: int) -> str | None:
    """The arguments of a function that cannot take `count` positional ones: `(losses)`. None where
    it can, or where Python sees no signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return str(signature.replace(return_annotation=inspect.Signature.empty))
    return None


def duration(seconds: float) -> str:
    """12.3 ms, 1.04 s, 45.2 s, 3 min 05 s, 2 h 07 min, 3.2 days: three digits or more up to days,
    since a plan ranks settings by them."""
    milliseconds = 1000 * seconds
    if milliseconds < 999.5:  # what rounds to 1000 is a second
        return f"{milliseconds:#.3g}".rstrip(".") + " ms" if milliseconds >= 5e-4 else "0 s"
    if seconds < 59.95:
        return f"{seconds:.{2 if seconds < 9.995 else 1}f} s"
    whole, minutes = round(seconds), round(seconds / 60)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{seconds / 86_400:.1f} days"
