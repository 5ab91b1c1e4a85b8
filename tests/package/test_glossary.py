"""docs/glossary.md defines each term once; texts that users read keep to its words."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import typer

import vlmpack
from vlmpack.cli.app import app
from vlmpack.packing.batch import PackedBatch, PackedSeqParams
from vlmpack.recipe import json_schema

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/glossary.md").read_text()
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split(" | "))
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| term")
]
ROWS, GONE = [row for row in ROWS if len(row) == 3], [row for row in ROWS if len(row) == 2]
SCHEMA = json_schema()
OF_CODE = ("glossary.md", "architecture.md")
"""Pages that name what only code calls so, such as a bin."""
ASKED = "sample row bin pack slot sequence micro-batch cu_seqlens THD loss_mask alignment era"


def resolved(node):
    while "$ref" in node:
        node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
    return node


def keys(node, prefix=""):
    """Every dotted key of a recipe, with the doc of its field."""
    for part in [node, *node.get("anyOf", ()), *node.get("oneOf", ())]:
        part = resolved(part.get("items", part))
        for name, child in part.get("properties", {}).items():
            yield prefix + name, child.get("description", "")
            yield from keys(resolved(child), f"{prefix}{name}.")


def commands(command, path="vlmpack"):
    """Every command by its words, with it."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{path} {name}")


KEYS = dict(keys(SCHEMA))
COMMANDS = dict(commands(typer.main.get_command(app)))


def test_each_term_is_defined_once_in_a_sentence_of_its_own():
    terms = [term for term, _, _ in ROWS]
    assert len(terms) > 40 and len(set(map(str.casefold, terms))) == len(terms)
    assert set(ASKED.split()) | {"shuffle window", "attention window", "image cost"} <= set(terms)
    for term, sentence, _ in ROWS:
        assert re.fullmatch(r"[A-Z][^.]*(\.json[^.]*)?\.", sentence), sentence
        assert re.search(re.sub("[_ ]", ".", term.removesuffix("s")), sentence, re.IGNORECASE), term


def test_a_word_that_went_is_no_term():
    assert len(GONE) > 5
    assert {row[0] for row in GONE}.isdisjoint(term for term, _, _ in ROWS)


def test_where_a_term_shows_there_is_such_a_name():
    fields = {
        f"{batch.__name__}.{name}"
        for batch in (PackedBatch, PackedSeqParams)
        for name in {field.name for field in dataclasses.fields(batch)} | set(dir(batch))
    }
    for term, _, where in ROWS:
        name = where.strip("`")
        assert name in {*KEYS, *fields, *COMMANDS, *vlmpack.__all__}, (term, where)


def user_texts():
    """Every text that a user reads before a run: docs of keys, help of commands and options."""
    yield from KEYS.items()
    for path, command in COMMANDS.items():
        yield path, command.help or ""
        for option in command.params:
            if not getattr(option, "hidden", False):
                yield f"{path} {' '.join(option.opts)}", getattr(option, "help", None) or ""
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name not in OF_CODE]
    for page in [*pages, ROOT / "README.md"]:
        yield page.name, " ".join(page.read_text().split())


@pytest.mark.parametrize(
    ("word", "rather"),
    [
        (r"(?<!shuffle )(?<!attention )(?<!sliding )(?<!`)\bwindows?\b(?!`)", "shuffle window"),
        (r"(?<!/)\b[Bb]ins?\b(?!/)", "row"),
        (r"\b(mini-?batch|minibatch)", "micro-batch"),
        (r"\bmicro ?batch", "micro-batch"),
        (r"\b(shared )?stretch of (tokens|a sample)|\bshared stretch", "shared prefix"),
        (r"\b[Cc]ontext slices?\b", "slice"),
        (r"\bunread\b", "not read"),
        (r"\bbegun\b", "started"),
        (r"\b[Aa]bsent\b", "missing"),
    ],
)
def test_no_other_word_is_used_for_a_term(word, rather):
    found = [
        f"{place}: ...{text[max(0, match.start() - 30) : match.end() + 20]!r}"
        for place, text in user_texts()
        for match in re.finditer(word, text)
    ]
    assert found == [], f"the glossary's word is {rather!r}"
