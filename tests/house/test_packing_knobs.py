"""A knob of the packing section is read in few places: whoever depends on it asks the mode."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.shards import ROOT

from vlmpack.recipe.schema import PackingSection

PACKAGE = ROOT / "vlmpack"
OWN_ROOMS = ("recipe", "packing", "report")
"""Who says what a knob is, who obeys it, who shows it."""
MOST_MODULES = 4

CARRIED = {"max_patches": "max_vision_patches"}
"""Other names under which a knob is carried."""
COMMON = ("mode", "path")
"""Names that much else has: they count where the section is what is read."""
OF_OTHERS = ("processor.max_patches", "settings.share_prefix", "manifest.share_prefix")
"""Of transformers' own image processors, of an encoder, of saved packs."""


def _sections(tree: ast.AST) -> set[str]:
    """Names that a module gives to the section."""
    found = {"packing"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            targets = target.elts if isinstance(target, ast.Tuple) else [target]
            values = value.elts if isinstance(value, ast.Tuple) else [value]
            for name, said in zip(targets, values, strict=False):
                if isinstance(name, ast.Name) and ast.unparse(said).endswith(".packing"):
                    found.add(name.id)
        elif isinstance(node, ast.arg) and "PackingSection" in ast.unparse(node.annotation or node):
            found.add(node.arg)
    return found


def reads(source: str) -> Iterator[str]:
    """The knobs that a module reads, once for each place.

    A read is `x.knob`, or `getattr(x, "knob")`, whatever x is; of the names in COMMON alone, x must
    be the section: `packing`, `*.packing`, or what the module calls it.
    """
    tree = ast.parse(source)
    sections = _sections(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            receiver, name = ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            receiver = ast.unparse(node.args[0])
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
        else:
            continue
        knob = CARRIED.get(name, name)
        if (
            knob not in PackingSection.model_fields
            or f"{receiver.rpartition('.')[2]}.{name}" in OF_OTHERS
        ):
            continue
        if knob not in COMMON or receiver.rpartition(".")[2] in sections:
            yield knob


@cache
def readers(package: Path) -> dict[str, list[str]]:
    """Knob -> the modules that read it, but for the rooms that own it."""
    found: dict[str, list[str]] = {name: [] for name in PackingSection.model_fields}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if name.partition("/")[0] in OWN_ROOMS:
            continue
        for knob in set(reads(path.read_text())):
            found[knob].append(name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("knob", PackingSection.model_fields)
def test_a_knob_is_read_in_few_modules(knob: str) -> None:
    found = readers(PACKAGE)[knob]
    owners = [name for name in found if name == "data/modes.py"]
    assert owners or knob in ("balance", "path"), "looked past it"
    assert found, "nobody reads it"
    assert len(found) <= MOST_MODULES, found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("most = recipe.packing.max_sequences", ["max_sequences"]),
        ("most = split.plan.packer.budget.max_sequences", ["max_sequences"]),
        ("most = budget.max_patches", ["max_vision_patches"]),
        ("most = processor.max_patches", []),
        ("if self.encoder.settings.share_prefix: pass", []),
        ("if packing.share_prefix: pass", ["share_prefix"]),
        ('most = getattr(row, "max_tokens")', ["max_tokens"]),
        ("if setup.recipe.packing.mode == 'none': pass", ["mode"]),
        ("knobs, other = recipe.packing, 1\nknobs.mode", ["mode"]),
        ("def rule(section: PackingSection): return section.path", ["path"]),
        ("image.mode, file.path, self.mode", []),
        ("budget.max_tokens = 3", []),
        ("note = 'packing.max_tokens is 3'", []),
    ],
)
def test_a_read_is_seen_however_it_is_spelt(source: str, expected: list[str]) -> None:
    assert list(reads(source)) == expected


def test_a_fifth_reader_is_found(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"m{number}.py").write_text("x = row.budget.alignment\n")
    (tmp_path / "packing").mkdir()
    (tmp_path / "packing/own.py").write_text("x = self.alignment\n")
    assert readers(tmp_path)["alignment"] == [f"m{number}.py" for number in range(5)]
