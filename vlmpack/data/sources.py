"""From what the user wrote to a list of shards: plain paths, `file://`, brace ranges, globs.

`train-{000..003}.tar`, `{a,b}/train.tar` and `shards/*.tar` all work. The order is the pattern's
own (globs sorted), so the shard list, and with it the plan, is the same on every machine.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vlmpack.errors import RecipeError

MAX_EXPANDED = 1_000_000

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?=//|.)")


def expand_shards(patterns: Sequence[str], *, key: str) -> tuple[str, ...]:
    """All shards of a source, in order, as absolute paths.

    Args:
        patterns: what the recipe says.
        key: the recipe's key, for messages ("data.train").

    Raises:
        RecipeError: every pattern with an unsupported scheme, every pattern that matches nothing,
            every shard that is not there, and every shard named twice.
    """
    problems: list[str] = []
    shards: list[str] = []
    if not patterns:
        problems.append(f"{key}: names no shard; give a path such as 'shards/train-*.tar'")
    for pattern in patterns:
        try:
            shards.extend(_expand_one(pattern))
        except ValueError as error:
            problems.append(f"{key}: {pattern!r} {error}")
    seen: set[str] = set()
    for shard in shards:
        if shard in seen:
            problems.append(f"{key}: {shard!r} is named twice; each shard may be read once")
        seen.add(shard)
    if problems:
        raise RecipeError(problems)
    return tuple(shards)


def _expand_one(pattern: str) -> list[str]:
    """The shards of one pattern; ValueError completes the sentence "data.train: 'x' ..."."""
    path = _local_path(pattern)
    found: list[str] = []
    missing: list[str] = []
    for name in _expand_braces(path):
        if glob.has_magic(name):
            found_here = sorted(glob.glob(name))  # noqa: PTH207 - patterns may be absolute
            matches = [match for match in found_here if Path(match).is_file()]
        else:
            matches = [name] if Path(name).is_file() else []
            if Path(name).is_dir():
                raise ValueError(f"is a folder; name its shards, for example '{name}/*.tar'")
        if not matches:
            missing.append(name)
        found.extend(str(Path(match).absolute()) for match in matches)
    if not found:
        raise ValueError(f"matches no file (from {Path.cwd()})")
    if missing:
        shown = ", ".join(repr(name) for name in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ValueError(f"matches {len(found)} files, but these are missing: {shown}{more}")
    return found


def _local_path(pattern: str) -> str:
    """The pattern as a local path; ValueError for every scheme but `file`."""
    scheme = _SCHEME.match(pattern)
    if scheme is None or Path(pattern).exists():
        return str(Path(pattern).expanduser())
    name = scheme.group(1).lower()
    if name == "file":
        parts = urlsplit(pattern.replace("?", "%3F").replace("#", "%23"))
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"names the host {parts.netloc!r}; write file:///absolute/path")
        return unquote(parts.path)
    if name == "pipe":
        raise ValueError("starts a program; 'pipe:' is never run. Give the shard's own path")
    raise ValueError(
        f"has the scheme '{name}:', which this version cannot read; use a local path or file://"
    )


def _expand_braces(pattern: str) -> list[str]:
    """`a{0..2}{x,y}` -> six names; numbers keep the width of the first bound."""
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    bounds = _RANGE.fullmatch(match.group(1))
    if bounds is None:
        choices = match.group(1).split(",")
        if len(choices) < 2:
            raise ValueError(f"has braces that are neither a range nor a list: {match.group(0)!r}")
    else:
        first, last = int(bounds.group(1)), int(bounds.group(2))
        if last < first:
            raise ValueError(f"has an empty range {match.group(0)!r}: {last} comes before {first}")
        if last - first >= MAX_EXPANDED:
            raise ValueError(f"has a range of {last - first + 1} names; at most {MAX_EXPANDED}")
        width = len(bounds.group(1))
        choices = [str(number).zfill(width) for number in range(first, last + 1)]
    head, tail = pattern[: match.start()], pattern[match.end() :]
    tails = _expand_braces(tail)
    if len(choices) * len(tails) > MAX_EXPANDED:
        raise ValueError(f"expands to more than {MAX_EXPANDED} names")
    return [head + choice + rest for choice in choices for rest in tails]
