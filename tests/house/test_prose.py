"""Pages are read at first sight: short sentences, and few semicolons and colons.

Code, tables, headings and what a tool writes are left out. A line of a list is a paragraph. The
docs of the recipe and the help of the commands are counted in the reference pages that are made of
them, where the last cell of a row is a paragraph. Their limits are closer.

Docstrings and messages of the package have limits too. In a docstring, an entry of `Args:` and a
row of a table are paragraphs, and an indented example is left out.
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRITTEN_BY_TOOLS = "<!-- generated"
PAGES = [
    page
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
    if not page.read_text().startswith(WRITTEN_BY_TOOLS)
]
REFERENCE = sorted((ROOT / "docs/reference").glob("*.md"))
LONG = 40
PAGE, ENTRY = (30, 0.02, 0.4), (24, 0.0, 0.3)
"""Limits of a page and of the docs of keys and options: words, share of long ones, pauses."""
DOCSTRINGS = (20, 0.0, 0.25)
"""The same of all docstrings together."""
PARAGRAPH, MESSAGE = 2, 1
"""Most semicolons and colons in a paragraph of a docstring, and semicolons in a message."""

PACKAGE = sorted((ROOT / "vlmpack").rglob("*.py"))
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields):$")
ENTRY_NAMES = re.compile(r"[*\w.]+(?:, [*\w.]+)*:(?=\s|$)")
ROW_NAMES = re.compile(r" *\S+(?: \S+)* {2,}(?=\S)")
TABLE_ROW = re.compile(r" *\S+(?: \S+)* {3,}(?=\S)")


def paragraphs(text: str) -> list[str]:
    """Prose alone, a paragraph or a line of a list each."""
    text = re.sub(r"^ *(```|~~~).*?^ *\1$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!-- (\w+) -->.*?<!-- (/|end of )\1 -->", "\n", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^ *(\||#|!\[|!!!).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^(?: {4}(?! *[-*] | *\d+\. )\S.*\n)+(?=\n)", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ *([-*]|\d+\.) ", "\n", text, flags=re.MULTILINE)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def sentences(text: str) -> list[str]:
    """What of a page a reader reads as a sentence; an address is one word, code another."""
    found = []
    for part in paragraphs(text):
        part = re.sub(r"`[^`]*`", "code", part)
        part = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", part)
        part = re.sub(r"https?://\S+", "address", part)
        part = re.sub(r"\b(e\.g|i\.e|vs|etc)\.", r"\1", part)
        found += re.split(r"(?<=[.!?])[*_)\"]*\s+(?=[*_(\"\[]*[A-Z0-9c])", part)
    return [sentence for sentence in found if re.search(r"\w", sentence)]


def figures(text: str) -> tuple[int, int, float, float]:
    """Sentences, words that nine tenths of them have at most, share over 40, pauses a sentence."""
    all_of_it = sentences(text)
    words = sorted(len(re.findall(r"\S*\w\S*", sentence)) for sentence in all_of_it)
    pauses = sum(len(re.findall(r"[;:](?=\s|$)", sentence)) for sentence in all_of_it)
    tenth = words[min(len(words) - 1, len(words) * 9 // 10)]
    long = sum(count > LONG for count in words) / len(words)
    return len(words), tenth, long, pauses / len(words)


def entries(page: str) -> str:
    """The paragraphs of a reference page, and what its tables say of each key or option."""
    rows = re.findall(r"^\| `.*\|$", page, re.MULTILINE)
    return "\n\n".join([page, *(re.split(r"(?<!\\)\|", row)[-2] for row in rows)])


def prose(docstring: str) -> str:
    """The paragraphs of a docstring. Names in front of entries and JSON keys are no prose."""
    kept = []
    for block in re.split(r"\n\s*\n", docstring):
        lines = block.split("\n")
        if SECTION.match(lines[0].strip()):
            margin = "".join(takewhile(str.isspace, lines[1]))
            entry = re.compile(rf"{margin}(?=\S)")
            lines = [
                f"\n{ENTRY_NAMES.sub('', line.strip(), count=1)}" if entry.match(line) else line
                for line in lines[1:]
            ]
        elif any(map(TABLE_ROW.match, lines)):
            lines = [ROW_NAMES.sub("\n", line, count=1) for line in lines]
        elif all(line.startswith("    ") for line in lines) and not re.match(r" *- ", lines[0]):
            continue
        kept.append("\n".join(line if line[:1] == "\n" else line.strip() for line in lines))
    return re.sub(r'(?<="):(?=\s)', "", re.sub(r"`[^`]*`", "code", "\n\n".join(kept)))


def dense(text: str) -> list[str]:
    """Sentences of a docstring's prose that are too long, and paragraphs with many pauses."""
    long = [one for one in sentences(text) if len(re.findall(r"\S*\w\S*", one)) > LONG]
    return long + [
        part for part in paragraphs(text) if len(re.findall(r"[;:](?=\s|$)", part)) > PARAGRAPH
    ]


def text_of(node: ast.AST) -> str | None:
    """The text of a string or an f-string, an X for each value."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) or "X" for value in node.values)
    return None


def crowded(message: str) -> bool:
    return len(message.split()) > LONG or len(re.findall(r";(?=\s|$)", message)) > MESSAGE


def texts(source: str) -> tuple[list[str], list[str]]:
    """The docstrings of a module as prose, those of constants too, and its messages."""
    docs, said = [], []
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Expr) and (text := text_of(node.value)):
            docs.append(prose(inspect.cleandoc(text)))
        elif (text := text_of(node)) is None:
            waiting += ast.iter_child_nodes(node)
        elif len(text.split()) > 3:
            said.append(text)
    return docs, said


@cache
def package() -> dict[str, tuple[list[str], list[str]]]:
    return {str(path.relative_to(ROOT)): texts(path.read_text()) for path in PACKAGE}


def faults(text: str, limits: tuple[int, float, float] = PAGE) -> list[str]:
    """What of the limits a text does not keep."""
    names = ("words of nine tenths", "share of sentences over 40 words", "semicolons and colons")
    return [
        f"{name}: {value} > {most}"
        for name, value, most in zip(names, figures(text)[1:], limits, strict=True)
        if value > most
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_read_at_first_sight(page):
    assert faults(page.read_text()) == []


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.name)
def test_keys_and_options_are_read_at_first_sight(page):
    assert faults(entries(page.read_text()), ENTRY) == []


def test_a_dense_entry_of_a_reference_page_is_found():
    """The same of a key, before and after; a code and a default are no prose."""
    row = '| `checkpoint.resume` | `auto`, `never` | `{{"a": 1; }}` | {} |\n'
    plain = row.format("`auto` goes on from the newest checkpoint. `never: x` starts anew. ")
    dense = row.format("`auto`: go on from the newest checkpoint; `never`: start anew.")
    long = row.format(f"Go on from a checkpoint {'that is the newest one ' * 8}of the run.")
    assert figures(entries(plain * 20))[0] == 40
    assert faults(entries(plain * 20), ENTRY) == []
    assert faults(entries(dense * 20), ENTRY) == ["semicolons and colons: 3.0 > 0.3"]
    assert len(faults(entries(plain * 20 + long), ENTRY)) == 1, "no sentence is over 40 words"


def test_docstrings_are_read_at_first_sight():
    proses = {path: "\n\n".join(docs) for path, (docs, _) in package().items()}
    assert {path: found for path, text in proses.items() if (found := dense(text))} == {}
    assert faults("\n\n".join(proses.values()), DOCSTRINGS) == []


def test_messages_are_read_at_first_sight():
    found = {path: [*filter(crowded, said)] for path, (_, said) in package().items()}
    assert {path: said for path, said in found.items() if said} == {}


def test_a_dense_docstring_and_message_are_found():
    """Each of its parts as it may be and as it may not be; a table, an example, code are aside."""
    source = """
def read(row):
    '''Read a row: {plain}

        {example}: a; b: c; d
        def e(f: g): return h

    name     {plain}
    other    {plain}; {cell}

    Args:
        row: a `b: c; d;`: {entry}
        place, other: {plain}

    Returns:
        It. {returned}
    '''
    raise ValueError(f"{{row}} holds more than one; {message}")
"""
    good = {
        "plain": "It holds samples.",
        "example": '{"a": b}',
        "cell": "a cell",
        "entry": "a row",
        "returned": "It has one.",
        "message": "expected one",
    }
    docs, said = texts(source.format(**good))
    assert dense(docs[0]) == [] and said == ["X holds more than one; expected one"]
    assert not crowded(said[0])
    for place, bad in (
        ("cell", "a: b; c"),
        ("entry", "a: b; c: d"),
        ("returned", f"It has {'many words ' * 20}in all."),
    ):
        assert len(dense(texts(source.format(**good | {place: bad}))[0][0])) == 1, place
    for bad in ("expected one; use it", f"expected {'one ' * 40}"):
        assert crowded(texts(source.format(**good | {"message": bad}))[1][0])


def test_a_dense_page_is_found():
    """The manner in which these pages were once written, and the same said plainly."""
    plain = "A row holds several samples. No sample sees another. Labels are each sample's own. "
    dense = (
        "A row holds several samples: none sees another, since attention stops at boundaries; "
        "labels are each sample's own, and where one is damaged, which is said once and counted "
        "then, its place has neither tokens nor loss; nothing that stands behind it moves, so a "
        "run that goes on finds all others where they were. "
    )
    assert faults(plain * 20) == []
    assert len(faults(dense * 20)) == 3
    assert len(faults(plain * 10 + dense)) == 1, "one in thirty-one is too many"
    hidden = f"{plain}\n\n```\n{dense}\n```\n\n| {dense} |\n\n# {dense}\n"
    assert faults(hidden) == []


if __name__ == "__main__":
    for one in PAGES:
        print(one.relative_to(ROOT), *figures(one.read_text()))
    for one in REFERENCE:
        print(one.relative_to(ROOT), *figures(entries(one.read_text())))
