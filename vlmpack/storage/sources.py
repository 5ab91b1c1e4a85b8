"""From what the user wrote to a list of shards: paths, addresses, brace ranges, globs.

`train-{000..003}.tar`, `{a,b}/train.tar`, `shards/*.tar` and `s3://bucket/train-*.tar` all work.
The order is the pattern's own (globs sorted). So the shard list and the plan are the same on every
machine.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vlmpack.addresses import (
    HTTP_SCHEMES,
    SCHEMES,
    is_remote,
    no_shard,
    redacted,
    registered_name,
    scheme_of,
    secret_in,
    unreadable_key,
)
from vlmpack.errors import DataError, RecipeError, RefusedError
from vlmpack.limits import MAX_EXPANDED
from vlmpack.storage.fetch import Fetcher, ShardStamp, stamp_shards
from vlmpack.whole_file import read_json
from vlmpack.words import counted, meant_path, some_of

STATE_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"
"""What `datasets.save_to_disk` writes next to the files of a split, and next to the splits."""
MAX_NAMED = 5
"""Files that are no shards, in a message."""

_BRACES = re.compile(r"(?<!\$)\{([^{}]*)\}")
_RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")
_COLON = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?=//|.)")


@dataclass(frozen=True, slots=True)
class FoundShard:
    """A shard that a pattern names: an absolute path or address, with its stamp where a listing
    gave it."""

    path: str
    stamp: ShardStamp | None = None
    form: str = ""
    """As ShardStamp.form."""

    def seen(self, fetcher: Fetcher) -> ShardStamp:
        """Its version, from the listing or by a request.

        Raises:
            DataError: class `transport`.
        """
        return replace(self.stamp or fetcher.head(self.path), form=self.form)


def expand_shards(
    patterns: Sequence[str], *, key: str, fetcher: Fetcher | None = None
) -> tuple[str, ...]:
    """All shards of a source, in order, as absolute paths or addresses.

    Args:
        key: the recipe's key, for messages ("data.train").
        fetcher: lists stores, for globs in addresses.

    Raises:
        RecipeError: every pattern with an unsupported scheme, every pattern that matches nothing,
            every shard that is not there, and every shard named twice.
        DataError: a store that cannot be listed.
    """
    return tuple(shard.path for shard in find_shards(patterns, key=key, fetcher=fetcher))


def stamped_shards(
    patterns: Sequence[str], *, key: str, fetcher: Fetcher
) -> tuple[ShardStamp, ...]:
    """All shards of a source with their versions, in order: from a listing, or else a request for
    each.

    Raises:
        RecipeError: see `expand_shards`.
        DataError: a store that cannot be listed, or the first shard that cannot be reached.
    """
    shards = find_shards(patterns, key=key, fetcher=fetcher)
    known = {shard.path: shard.stamp for shard in shards if shard.stamp is not None}
    rest = [shard.path for shard in shards if shard.path not in known]
    known.update(zip(rest, stamp_shards(fetcher, rest), strict=True))
    return tuple(known[shard.path] for shard in shards)


def find_shards(
    patterns: Sequence[str], *, key: str, fetcher: Fetcher | None = None
) -> list[FoundShard]:
    """All shards of a source, in order, each with its version where a listing gave it.

    Raises:
        RecipeError, DataError: see `expand_shards`.
    """
    problems: list[str] = []
    shards: list[FoundShard] = []
    if not patterns:
        problems.append(f"{key}: names no shard; give a path such as 'shards/train-*.tar'")
    for pattern in patterns:
        if registered_name(pattern) is not None:
            shards.append(FoundShard(pattern))
            continue
        if secret := secret_in(pattern):
            problems.append(f"{key}: a {scheme_of(pattern)}:// address {secret}")
            continue
        try:
            shards.extend(_expand_one(pattern, fetcher))
        except ValueError as error:
            problems.append(f"{key}: {pattern!r} {error}")
    problems += [
        f"{key}: {redacted(shard.path)!r} {what}"
        for shard in shards
        if (what := unreadable_key(shard.path) or no_shard(shard.path))
    ][:MAX_NAMED]
    seen: set[str] = set()
    for shard in shards:
        if shard.path in seen:
            problems.append(f"{key}: {shard.path!r} is named twice; each shard may be read once")
        seen.add(shard.path)
    if problems:
        raise RecipeError(problems)
    return shards


def _expand_one(pattern: str, fetcher: Fetcher | None) -> list[FoundShard]:
    """The shards of one pattern. A ValueError completes the sentence "data.train: 'x' ..."."""
    if is_remote(pattern):
        if (stamp := _as_written(pattern, fetcher)) is not None:
            return [FoundShard(pattern, stamp)]
        return [
            shard for name in _expand_braces(pattern) for shard in _expand_address(name, fetcher)
        ]
    paths: list[str] = []
    missing: list[str] = []
    for name in _local_names(_local_path(pattern)):
        if _is_there(name, Path.is_file):
            matches = [name]
        elif _is_there(name, Path.is_dir):
            matches = files_of_folder(Path(name))
        elif _is_there(name, Path.exists):
            raise ValueError("is a pipe, a socket or a device; expected a regular file")
        elif glob.has_magic(name):
            literal, rest = _there(name)
            found_here = sorted(glob.glob(glob.escape(literal) + rest))  # noqa: PTH207 - may be absolute
            matches = [match for match in found_here if _is_there(match, Path.is_file)]
        else:
            matches = []
        if not matches:
            missing.append(name)
        paths.extend(str(Path(match).absolute()) for match in matches)
    if not paths:
        raise ValueError(f"matches no file (from {Path.cwd()}){meant_path(_local_path(pattern))}")
    if missing:
        raise ValueError(
            f"matches {counted(len(paths), 'file')}, but these are missing: "
            f"{some_of(map(repr, missing), 5)}"
        )
    return [FoundShard(path) for path in paths]


def _local_names(path: str) -> list[str]:
    """The names of a path with braces. What is there as it is written has none."""
    literal, rest = _there(path)
    return [literal + name for name in _expand_braces(rest)]


def _there(path: str) -> tuple[str, str]:
    """A path in two parts. The first exists under this very name, whatever its characters."""
    end = len(path)
    while end > 0 and not _is_there(path[:end], Path.exists):
        end = path.rfind("/", 0, end)
    end = max(end, 0)
    return path[:end], path[end:]


def _as_written(address: str, fetcher: Fetcher | None) -> ShardStamp | None:
    """The shard whose name is the pattern itself, or None. Stores that list need no request."""
    scheme = SCHEMES[scheme_of(address) or ""]
    asks = _BRACES.search(address) or (not scheme.lists and glob.has_magic(address))
    if fetcher is None or not asks or unreadable_key(address):
        return None
    try:
        return fetcher.head(address)
    except RefusedError:
        return None


def files_of_folder(folder: Path) -> list[str]:
    """The files of a folder as `datasets.save_to_disk` leaves it, in its own order.

    Raises:
        ValueError: it is another folder. The text completes the sentence "data.train: 'x' ...".
    """
    if (folder / SPLITS_FILE).is_file():
        folders = sorted(path.parent.name for path in folder.glob(f"*/{STATE_FILE}"))
        raise ValueError(f"holds several splits; name one: {', '.join(map(repr, folders))} in it")
    if not (folder / STATE_FILE).is_file():
        raise ValueError(
            f"is a folder; name its files, for example '{folder}/*.tar' or '{folder}/*.parquet' (a "
            "folder alone is what datasets.save_to_disk writes)"
        )
    try:
        state = read_json(folder / STATE_FILE)
        names = [str(item["filename"]) for item in state["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"has a {STATE_FILE} that cannot be read: {error!r}") from None
    files = [folder / name for name in names]
    if not files or any(name != file.name for name, file in zip(names, files, strict=True)):
        raise ValueError(f"has a {STATE_FILE} that names {names[:5]}; expected files of the folder")
    if gone := [file.name[:200] for file in files if not os.path.isfile(file)]:  # noqa: PTH113
        raise ValueError(f"lacks {', '.join(gone[:5])}, which its {STATE_FILE} names")
    return [str(file) for file in files]


def _expand_address(name: str, fetcher: Fetcher | None) -> list[FoundShard]:
    """One address, its braces gone; those without a glob are looked for when they are stamped."""
    scheme = scheme_of(name)
    assert scheme is not None, name
    place, _, file = name.partition("://")[2].partition("/")
    if file and not place:
        raise ValueError(f"needs a name before the first '/'; expected {scheme}://NAME/{file}")
    if not file or name.endswith("/"):
        raise ValueError(f"names no shard; expected {scheme}://.../train-000.tar")
    if not SCHEMES[scheme].lists:
        path, mark, _ = file.partition("?")  # on HTTP what follows is the query
        if "*" in path or "[" in path or (mark and scheme not in HTTP_SCHEMES):
            raise ValueError(
                f"has a glob, but {scheme}:// files cannot be listed; write the shards out with a "
                "brace range such as train-{000..031}.tar"
            )
        return [FoundShard(name)]
    if glob.has_magic(place):
        raise ValueError("has a glob in the name of the bucket; name the bucket")
    if not glob.has_magic(file):
        return [FoundShard(name)]
    if fetcher is None:
        raise ValueError("has a glob, and no store to list was given")
    literal = file[: re.search(r"[*?\[]", file).start()]  # type: ignore[union-attr]
    folder = literal[: literal.rfind("/") + 1]
    try:
        listed = fetcher.list_shards(f"{scheme}://{place}/{folder}")
    except DataError as error:
        raise error.located(shard=name) from None
    base = f"{scheme}://{place}/"
    keys = [stamp.path.removeprefix(base) for stamp in listed]
    as_written = _literal_parts(keys, file)
    matches: dict[str, ShardStamp] = {}
    for key, stamp in sorted(zip(keys, listed, strict=True), key=lambda pair: pair[0]):
        if not _matches(key, file, as_written):
            continue
        if stamp.size == 0 or key in matches:  # the mark of a folder is listed without its '/'
            try:
                stamp = fetcher.head(stamp.path)
            except RefusedError:
                continue
        matches[key] = stamp
    if not matches:
        raise ValueError(f"matches none of the {len(listed)} objects in {place}/{folder}")
    stamps = SCHEMES[scheme].listing_stamps
    return [FoundShard(stamp.path, stamp if stamps else None) for stamp in matches.values()]


def _literal_parts(keys: Sequence[str], pattern: str) -> int:
    """How many of the first parts of a pattern are there under their very names."""
    parts = pattern.split("/")
    for count in range(len(parts), 0, -1):
        name = "/".join(parts[:count])
        if any(key == name or key.startswith(f"{name}/") for key in keys):
            return count
    return 0


def _matches(key: str, pattern: str, literal: int) -> bool:
    """As a shell does: a glob stays within one folder, and leaves out names that begin with '.'."""
    parts, patterns = key.split("/"), pattern.split("/")
    if len(parts) != len(patterns) or parts[:literal] != patterns[:literal]:
        return False
    return all(
        fnmatch.fnmatchcase(part, want)
        and (want.startswith(".") or not part.startswith(".") or part in (".", ".."))
        for part, want in zip(parts[literal:], patterns[literal:], strict=True)
    )


def _is_there(name: str, is_so: Callable[[Path], bool]) -> bool:
    """Whether a path is a file, or a folder; no name that the system refuses is."""
    try:
        return is_so(Path(name))
    except (OSError, ValueError):
        return False


def _local_path(pattern: str) -> str:
    """The pattern as a local path; ValueError for every scheme but `file`."""
    scheme = _COLON.match(pattern)
    if scheme is None or _is_there(pattern, Path.exists):
        try:
            return str(Path(pattern).expanduser())
        except RuntimeError:
            raise ValueError("names the home of an unknown user") from None
    name = scheme.group(1).lower()
    if name == "file":
        parts = urlsplit(pattern.replace("?", "%3F").replace("#", "%23"))
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"names the host {parts.netloc!r}; write file:///absolute/path")
        return unquote(parts.path)
    if name == "pipe":
        raise ValueError("starts a program; 'pipe:' is never run. Give the shard's own path")
    raise ValueError(
        f"has the scheme '{name}:', which is not read; use a path, file://, "
        + ", ".join(f"{known}://" for known in SCHEMES)
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
