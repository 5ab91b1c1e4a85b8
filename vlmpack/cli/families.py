"""`vlmpack families`: what can be done with which model, and why not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from vlmpack.cli.options import argument, option
from vlmpack.errors import VlmpackError
from vlmpack.terminal import open_console, say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from vlmpack.capabilities.table import TextTable

PIPED_WIDTH, UNBOUND = 120, 1000


def families(
    folder: Annotated[Path | None, argument("families.folder")] = None,
    as_markdown: Annotated[bool, option("families.as_markdown")] = False,
    into: Annotated[Path | None, option("families.into")] = None,
) -> None:
    """List the model families, and what each can do with the packages that are installed."""
    from vlmpack.capabilities.table import capabilities, markdown, text_table
    from vlmpack.capabilities.versions import TESTED, installed_versions

    if into is not None or as_markdown:
        if folder is not None:
            raise VlmpackError(
                f"{folder}: --markdown and --into write the table of all families; leave the "
                f"folder out"
            )
        block = markdown(text_table(capabilities(TESTED)), TESTED)
        if into is not None:
            _write(into, block)
        else:
            say(block, nl=False)
    elif folder is not None:
        _print_model(folder, installed_versions())
    else:
        _print_table(installed_versions())


def _write(path: Path, block: str) -> None:
    from vlmpack.capabilities.table import END, START, with_block

    try:
        text = with_block(path.read_text(encoding="utf-8"), block)
        if text is None:
            raise VlmpackError(f"{path} has no lines {START} and {END} to write between")
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise VlmpackError(f"{path}: {error.strerror or error}") from error


def _print_table(versions: Mapping[str, str | None]) -> None:
    from rich.table import Table

    from vlmpack.capabilities.table import (
        KINDS,
        PROVEN,
        capabilities,
        narrowed,
        proven_names,
        refused_lines,
        text_table,
        versions_text,
    )

    console = _console()
    text = text_table(capabilities(versions))
    table = _families_table(text)
    whole = console.options.update(width=UNBOUND)
    if console.measure(table, options=whole).minimum > console.width:
        table = _families_table(narrowed(text), fold_titles=True)
    console.print(table)
    console.print(f"\nboth: the engines hf and mcore; here with {versions_text(versions)}")
    for note in text.notes:
        console.print(note)
    console.print()
    console.print(PROVEN.replace("`", ""))
    for title, words in KINDS.items():
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        table.add_column(title.lower(), max_width=28)
        table.add_column("")
        table.add_row("proven", ", ".join(proven_names(words)))
        for names, reason in refused_lines(words):
            table.add_row(names, f"refused: {reason}")
        console.print()
        console.print(table)


def _families_table(text: TextTable, *, fold_titles: bool = False) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    names = [name.replace(" ", "\n") for name in text.columns]
    lines = max(name.count("\n") for name in names)
    for place, name in enumerate(names):
        whole = place > 0 or not fold_titles
        table.add_column("\n" * (lines - name.count("\n")) + name, no_wrap=whole)
    for row in text.rows:
        table.add_row(*row)
    return table


def _print_model(folder: Path, versions: Mapping[str, str | None]) -> None:
    from rich.table import Table

    from vlmpack.capabilities.config import prediction_layers
    from vlmpack.capabilities.folder import read_config, served_model_type
    from vlmpack.capabilities.limits import ENGINES
    from vlmpack.capabilities.served import GENERIC
    from vlmpack.capabilities.table import model_table, row_of, versions_text

    model_type = served_model_type(folder)
    row = row_of(model_type, versions)
    console = _console()
    console.print(f"{folder}: {row.model.title} (model_type {model_type})", soft_wrap=True)
    if row.model.family == GENERIC:
        console.print(
            "no family of ours serves it: the generic one does where `vlmpack verify` passes on "
            "it, which is seen to before the first step",
            soft_wrap=True,
        )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", *(f"model.backend: {engine}" for engine in ENGINES)):
        table.add_column(name)
    for line in model_table(row):
        table.add_row(*line)
    console.print(table)
    only = row.model.attention
    if only is not None:
        console.print(f"model.attention: {' or '.join(only.names)} alone, since {only.reason}")
    counted = prediction_layers(read_config(folder))
    if counted is not None:
        key, count = counted
        console.print(f"multi-token prediction ({key} {count}): kept, not trained", soft_wrap=True)
    console.print(f"with {versions_text(versions)}")


def _console() -> Console:
    return open_console(piped=PIPED_WIDTH, highlight=False, markup=False)
