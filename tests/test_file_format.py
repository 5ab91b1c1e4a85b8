"""Files of ours say their format; one without it is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from vlmpack import file_format
from vlmpack.errors import PacksError
from vlmpack.file_format import FORMAT, FileKind

KINDS = [kind for kind in vars(file_format).values() if isinstance(kind, FileKind)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_kind_takes_its_own_format_alone(kind: FileKind) -> None:
    content = kind.mark({"x": 1})
    assert content == {FORMAT: 1, "x": 1}, "0.1.0 has the first formats"
    kind.take(content, "it", PacksError)
    assert content == {"x": 1}
    for number in (None, 0, 2, "1"):
        assert kind.refusal(number, Path("it")) is not None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_file_without_the_key_is_refused_with_what_makes_it_again(kind: FileKind) -> None:
    content: dict[str, Any] = {"version": 1}
    words = rf"^it was written by an unreleased vlmpack; remake it with {re.escape(kind.remake)}$"
    with pytest.raises(PacksError, match=words):
        kind.take(content, "it", PacksError)
    with pytest.raises(PacksError, match="it has vlmpack_format 2, and this vlmpack reads 1; use"):
        kind.take({FORMAT: 2}, "it", PacksError)
