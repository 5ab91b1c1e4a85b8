"""Pages are read at first sight: short sentences, and few semicolons and colons.

Code, tables, headings and what a tool writes are left out. A line of a list is a paragraph.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRITTEN_BY_TOOLS = "<!-- generated"
PAGES = [
    page
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
    if not page.read_text().startswith(WRITTEN_BY_TOOLS)
]
LONGEST_OF_TENTH, LONG, SHARE_OF_LONG, PAUSES = 30, 40, 0.02, 0.4


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


def faults(text: str) -> list[str]:
    """What of the four limits a text does not keep."""
    _, tenth, long, pauses = figures(text)
    return [
        f"{name} {value} > {most}"
        for name, value, most in (
            ("words of nine tenths of the sentences", tenth, LONGEST_OF_TENTH),
            ("share of sentences over 40 words", long, SHARE_OF_LONG),
            ("semicolons and colons a sentence", pauses, PAUSES),
        )
        if value > most
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_read_at_first_sight(page):
    assert faults(page.read_text()) == []


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
