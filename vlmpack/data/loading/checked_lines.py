"""Lines of JSON objects that carry a CRC-32 of themselves, so that no flipped bit changes one.

    {"batch": 3, "key": "a", "crc32": "8c736521"}

The checksum is of the text as it stands, without its own entry.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlmpack.whole_file import open_regular

_CHECKED = re.compile(rb'(\{.*), ?"crc32": ?"([0-9a-f]{8})"\}', re.DOTALL)


def checked_line(value: Mapping[str, Any], *, compact: bool = False) -> bytes:
    """One line, its end included."""
    comma, colon = (",", ":") if compact else (", ", ": ")
    plain = {name: item for name, item in value.items() if name != "crc32"}
    text = json.dumps(plain, separators=(comma, colon)).encode()
    return text[:-1] + f'{comma}"crc32"{colon}"{zlib.crc32(text):08x}"}}\n'.encode()


def parse_line(text: bytes) -> dict[str, Any]:
    """The object of a line, without its checksum.

    Raises:
        ValueError: it is damaged, or no object.
    """
    text = text.removesuffix(b"\n")
    match = _CHECKED.fullmatch(text)
    if match is None or not _has_its_checksum(match):
        raise _fault(match)
    try:
        value: dict[str, Any] = json.loads(match.group(1) + b"}")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def parse_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    """(line number, object or what is wrong) of a file; a last line without its end is left out."""
    for number, text in _whole_lines(path):
        try:
            yield number, parse_line(text)
        except ValueError as error:
            yield number, error


def damaged_lines(path: Path) -> Iterator[tuple[int, ValueError]]:
    """(line number, error) of a file's damaged lines. A last line without its end is left out."""
    for number, text in _whole_lines(path):
        match = _CHECKED.fullmatch(text, 0, len(text) - 1)
        if match is None or not _has_its_checksum(match):
            yield number, _fault(match)


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    if not path.exists():
        return
    with open_regular(path) as stream:
        for number, text in enumerate(stream, start=1):
            if not text.endswith(b"\n"):
                return
            yield number, text


def _fault(match: re.Match[bytes] | None) -> ValueError:
    what = "it has no checksum" if match is None else "its checksum is not that of its text"
    return ValueError(what)


def _has_its_checksum(match: re.Match[bytes]) -> bool:
    return zlib.crc32(b"}", zlib.crc32(match.group(1))) == int(match.group(2), 16)


def ends_torn(path: Path) -> bool:
    """Whether the file's last line has no end: a kill or a full disk cut it."""
    try:
        with open_regular(path) as stream:
            if stream.seek(0, 2) == 0:
                return False
            stream.seek(-1, 2)
            return stream.read(1) != b"\n"
    except FileNotFoundError:
        return False
