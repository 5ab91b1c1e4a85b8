"""The table of limits: docs/data.md says it, and what is found above them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.shards import ROOT

from vlmpack import limits
from vlmpack.data.shards.samples import cook_texts
from vlmpack.encode import Encoder
from vlmpack.encode.images import layouts_of
from vlmpack.encode.sample import VideoPart
from vlmpack.errors import DataError, RecipeError
from vlmpack.limits import MAX_BRANCHES, MAX_RECIPE_PROBLEMS, MAX_RECORD_KEYS, MAX_TURNS
from vlmpack.recipe import load_recipe, messages

ROWS = {
    "MAX_SAMPLE_BYTES": "bytes of all its members",
    "MAX_MEMBER_BYTES": "bytes of a member",
    "MAX_JSON_BYTES": "bytes of its JSON, its line or its row",
    "MAX_MEMBERS": "members",
    "MAX_RECORD_KEYS": "keys of a record, columns of a table",
    "MAX_TURNS": "turns",
    "MAX_BRANCHES": "branches",
    "MAX_VALUE_DEPTH": "depth of tools and arguments",
    "MAX_IMAGES": "images",
    "MAX_IMAGE_PIXELS": "pixels of an image (`data.max_image_pixels`)",
    "MAX_FRAMES": "frames of videos",
    "MAX_CLIP_PIXELS": "pixels of all frames of a video together",
    "LONGEST_SECONDS": "seconds of a video",
    "MAX_GROUP_BYTES": "bytes of a row group or a batch, of the columns that are read",
    "MAX_EXTENSIONS": "extended headers before a member",
    "MAX_EXTENSION_BYTES": "bytes of them",
    "MAX_PAX_RECORDS": "pax records before a member",
    "MAX_NAME_BYTES": "bytes of a member's name",
    "MAX_FOREIGN_BYTES": "bytes of a name that is not UTF-8",
    "MAX_EXPANDED": "names of a brace range",
    "MAX_RECIPE_BYTES": "bytes",
    "MAX_RECIPE_DEPTH": "depth",
    "MAX_RECIPE_PROBLEMS": "problems that are listed",
}
"""Limit -> its row in docs/data.md."""


def shown(limit: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if limit >= size and limit % size == 0:
            return f"{limit // size} {unit}"
    return f"{limit:,.0f}"


def test_the_page_has_every_limit() -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("### Limits\n")
    table = re.findall(r"^\| ([^|]+) \| ([\d,]+[^|]*) \|$", rest.partition("\n## ")[0], re.M)
    found = {name: value for name, value in vars(limits).items() if name.isupper()}
    assert table == [(ROWS[name], shown(value)) for name, value in found.items()]


TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("record", "most", "reason"),
    [
        (lambda n: {"messages": (TALK * n)[:n]}, MAX_TURNS, "'messages' has 2,049 turns"),
        (
            lambda n: {"messages": TALK[:1], "branches": [TALK[1:]] * n},
            MAX_BRANCHES,
            "2,049 branches",
        ),
        (
            lambda n: {"messages": TALK, **{f"k{i}": 1 for i in range(n - 1)}},
            MAX_RECORD_KEYS,
            "4,097 keys or columns",
        ),
    ],
)
def test_a_record_above_a_limit_is_refused_and_one_at_it_is_read(
    record: Callable[[int], dict[str, Any]], most: int, reason: str
) -> None:
    cook_texts("k", "s", json.dumps(record(most)).encode(), ())
    with pytest.raises(DataError, match=f"{reason}; at most {most:,} are read"):
        cook_texts("k", "s", json.dumps(record(most + 1)).encode(), ())


def test_frames_of_too_many_pixels_together_are_refused(encoder: Encoder) -> None:
    count = 100
    side = math.isqrt(limits.MAX_CLIP_PIXELS // count)
    clip = (VideoPart(0, tuple(map(float, range(count))), 1.0),)
    layouts_of(encoder._rules(clip), [(side, side)] * count, (), clip)
    with pytest.raises(DataError, match="pixels together; at most 2,000,000,000 are decoded"):
        layouts_of(encoder._rules(clip), [(side + 1, side)] * count, (), clip)


def test_a_recipe_of_many_unknown_keys_names_the_first_and_counts_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: set[str] = set()

    def near(key: str, *_: object, **__: object) -> list[str]:
        asked.add(key)
        return []

    monkeypatch.setattr(messages, "difflib", SimpleNamespace(get_close_matches=near))
    keys = {f"odd_{n}": n for n in range(3 * MAX_RECIPE_PROBLEMS)}
    with pytest.raises(RecipeError) as error:
        load_recipe({"run_dir": "x", **keys})
    assert len(error.value.problems) == MAX_RECIPE_PROBLEMS + 1
    assert error.value.problems[-1].endswith("more problems")
    assert 0 < len(asked) <= MAX_RECIPE_PROBLEMS
