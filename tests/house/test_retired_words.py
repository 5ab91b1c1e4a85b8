"""Words that the glossary retired are in no name of vlmpack, but for a list with reasons."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.shards import ROOT

RETIRED = {
    "absent": "missing",
    "began": "started",
    "begin": "start",
    "begun": "started",
    "beside": "what it is: inputs, others, added",
    "fork": "prefix",
    "heard": "seen, recorded",
    "odd": "unexpected, uneven, unusual",
    "opened": "what it is: train, source, num_packs",
    "placed": "located, numbered, put_first",
    "settle": "resolve",
    "sibling": "prefix group",
    "stretch": "span, segment",
    "told": "stated, known, reported",
    "unfold": "without prefixes",
    "unread": "unused, unknown",
}
"""Retired word -> what to say for it. A name may have no other form of it either."""

FOREIGN = {
    "fork_rng": "torch: draws that leave the generator as it was",
    "register_at_fork": "Python: what is called around os.fork",
    "siblings": "the hub: the files of a repository",
    "unfold": "torch: windows of a tensor",
}
"""Names that other packages chose -> what they are."""

_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_FORM = re.compile(rf"({'|'.join(RETIRED)})(s|es|d|ed|ing)?")


def names_in(source: str) -> Iterator[str]:
    """Every name that a module defines, imports, reads or passes an argument by."""
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "attr", "arg", "name", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield from name.split(".")


def is_retired(name: str) -> bool:
    """Whether a word of a name is a form of a retired one."""
    return any(_FORM.fullmatch(part.lower()) for part in _PART.findall(name))


def retired_in(root: Path) -> set[str]:
    """The names of a package and of its modules that have a retired word."""
    found = {path.stem for path in root.rglob("*.py") if is_retired(path.stem)}
    for path in root.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if any(word in source.lower() for word in RETIRED):
            found.update(filter(is_retired, names_in(source)))
    return found


def test_no_name_has_a_retired_word() -> None:
    assert retired_in(ROOT / "vlmpack") == FOREIGN.keys(), f"rather: {RETIRED}"


@pytest.mark.parametrize(
    "source",
    [
        "def is_absent(value): ...",
        "begin, end = span",
        "told = [*lengths]",
        "report.placed += 1",
        "def odd_key(address): ...",
        "rows = open_rows(_opened=path)",
        "class BesideLayers: ...",
        "class UnreadLengths: ...",
        "_SETTLED = 1",
        "import rows.unfold",
        "call(forks=1)",
        "model.settle()",
        "from rows import row as heard",
    ],
)
def test_a_name_with_one_is_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "module.py").write_text(source)
    assert retired_in(tmp_path)


def test_other_words_and_prose_are_not(tmp_path: Path) -> None:
    (tmp_path / "forkserver.py").write_text('"""An absent part."""\nunreadable = breadth = 1\n')
    assert retired_in(tmp_path) == set()
    (tmp_path / "unread.py").touch()
    assert retired_in(tmp_path) == {"unread"}
