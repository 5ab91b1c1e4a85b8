"""Small JSON files: a value that fits what is done with it later, or a ValueError."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from support.fuzz import changed, damaged

from vlmpack.whole_file import MOST_DEPTH, parse_small_json, read_json

GOOD = {"step": 3, "loss": 0.5, "names": ["a", "\u00e4"], "deep": {"seed": 2**128 - 1, "no": None}}


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def test_a_value_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(GOOD))
    assert read_json(path) == GOOD
    assert parse_small_json("[1, NaN]", list)[0] == 1
    assert parse_small_json("7", object) == 7
    assert parse_small_json(nested(MOST_DEPTH), list)
    assert parse_small_json(f"[{2**128}]", list, any_number=True) == [2**128]
    assert parse_small_json(r'"\udcff"', str) == "\udcff", "a byte of a file's name"
    assert parse_small_json(r'"\ud83d\ude00"', str) == "\N{GRINNING FACE}"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Expecting value"),
        (b'{"a": "\xff"}', "utf-8"),
        ("{}".encode("utf-16"), "utf-8"),
        (b"[]", "it holds a list; expected an object"),
        (b"null", "it holds None; expected an object"),
        (nested(MOST_DEPTH + 1).join(('{"a":', "}")).encode(), "levels deep"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": 340282366920938463463374607431768211456}', "more than 128 bits"),
        (b'{"a": [' + b"9" * 5000 + b"]}", "4300 digits"),
    ],
)
def test_what_is_none_says_why(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=why):
        read_json(path)


def test_whatever_lies_there_is_a_value_or_a_value_error() -> None:
    good = json.dumps(GOOD).encode()
    ends = []
    for number in range(500):
        draw = random.Random(number)
        data = damaged(good, draw, [good])
        if number % 2:
            data = json.dumps(changed(GOOD, draw)).encode()
        try:
            ends.append(len(json.dumps(parse_small_json(data))))
        except ValueError:
            ends.append(0)
    assert 50 < sum(map(bool, ends)) < 450
