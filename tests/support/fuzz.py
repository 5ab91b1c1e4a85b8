"""Damage by lot: bytes, texts and values that were good once. The same seed, the same damage."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUMBERS = (
    b"0",
    b"-1",
    b"9999999999999999999999",
    b"9" * 5000,
    b"1_0",
    b"1e999",
    b"NaN",
    b"Infinity",
    b"0x10",
    b"+7",
    "\u00b2".encode(),
    "\u0662".encode(),
    "\u00b2".encode("latin-1"),
)
PIECES = (
    b"\x00",
    b"\xff\xfe",
    b"\x1b[2J",
    b"[" * 3000,
    b'{"a":' * 1500,
    b"%00",
    b"\r\n",
    b"\n",
    b"..",
    b"/",
    b":",
    b"=",
    b'"',
    b"\\ud800",
    b"${env:",
    b"{0..9}",
    b"<image>",
    "\u202e".encode(),
)
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**64,
    10**400,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\x00",
    "\ud800",
    "\u00b2",
    "9" * 5000,
    "../..",
    "${env:NOT_SET}",
    [],
    {},
    [None],
    {"": None},
    DEEP,
)


def damaged(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """One to four faults in some bytes."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        data = _one_fault(data, draw, others)
    return data


def _one_fault(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    at = draw.randrange(len(data) + 1)
    to = min(len(data), at + draw.choice((1, 2, 8, 64, 512)))
    match draw.randrange(9):
        case 0 if at < len(data):
            return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at]
        case 2:
            return data[:at] + data[to:]
        case 3:
            return data[:to] + data[at:]
        case 4:
            other = draw.choice(others)
            return data[:at] + other[draw.randrange(len(other) + 1) :]
        case 5:
            return data[:at] + draw.choice(PIECES) + data[to:]
        case 6:
            return data[:at] + draw.randbytes(draw.choice((1, 4, 32))) + data[to:]
        case _:
            return _other_number(data, draw, at)


def _other_number(data: bytes, draw: random.Random, at: int) -> bytes:
    """The next number of a text, replaced by one that its reader may not expect."""
    start = next((n for n in range(at, len(data)) if 48 <= data[n] < 58), None)
    if start is None:
        return data + draw.choice(NUMBERS)
    end = start
    while end < len(data) and 48 <= data[end] < 58:
        end += 1
    return data[:start] + draw.choice(NUMBERS) + data[end:]


def changed(value: Any, draw: random.Random) -> Any:
    """A copy of a JSON value in which one to three places hold something else, or nothing."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 2, 3))):
        value = _changed_once(value, draw)
    return value


def _changed_once(value: Any, draw: random.Random) -> Any:
    places: list[tuple[Any, Any]] = []
    pending = [value]
    while pending and len(places) < 500:
        node = pending.pop()
        items = (
            node.items()
            if isinstance(node, dict)
            else enumerate(node)
            if isinstance(node, list)
            else ()
        )
        for key, item in items:
            places.append((node, key))
            pending.append(item)
    if not places or draw.random() < 0.02:
        return copy.deepcopy(draw.choice(VALUES))
    node, key = draw.choice(places)
    kind = draw.randrange(5)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, dict):
        key = draw.choice(("", "x", "text", "path", "\x00", "type"))
        node[key] = copy.deepcopy(draw.choice(VALUES))
    elif kind == 2:
        other, place = draw.choice(places)
        if place in other if isinstance(other, dict) else place < len(other):
            node[key] = copy.deepcopy(other[place])
    else:
        node[key] = copy.deepcopy(draw.choice(VALUES))
    return value


def json_bytes(value: Any) -> bytes:
    """As JSON, half pairs and infinities included."""
    return json.dumps(value).encode()


@dataclass(frozen=True, slots=True)
class Door:
    """One way in for outside input.

    Args:
        name: of the door.
        share: of all inputs, in percent.
        open: prepares what it needs below a folder; what it returns makes one damaged input and
            goes through with it.
    """

    name: str
    share: float
    open: Callable[[Path], Callable[[random.Random], object]]
