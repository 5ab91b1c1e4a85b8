"""`vlmpack inspect`: one row of a recipe's plan, as training would get it, drawn and checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmpack.activity import ACTIVITY
from vlmpack.cli.options import Overrides, RecipeOrRun, option
from vlmpack.terminal import open_console, say

if TYPE_CHECKING:
    from vlmpack.proof.measure import Check
    from vlmpack.proof.rows.opening import ShownRow

PIPED_WIDTH = 120
"""Columns of the output where no terminal says."""

MAX_ROWS = 40
"""Segments in the terminal's table; the page has all."""


def inspect(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    row_: Annotated[int | None, option("inspect.row")] = None,
    batch: Annotated[int | None, option("inspect.batch")] = None,
    key: Annotated[str | None, option("inspect.key")] = None,
    shard: Annotated[str | None, option("inspect.shard")] = None,
    context: Annotated[int | None, option("inspect.context")] = None,
    output: Annotated[Path, option("inspect.output")] = Path("inspect"),
) -> None:
    """Show one packed row before training, as a page with checks. Exit code 1 if any fails.

    Needs no GPU and no weights. The model folder's configuration and tokenizer are enough.
    """
    from vlmpack.proof.rows.checks import check_row
    from vlmpack.proof.rows.opening import Wanted, open_row
    from vlmpack.report.inspect.page import write_row

    ACTIVITY.enter_alone("opening the data")

    choice = Wanted(row=row_, batch=batch, key=key, shard=shard)
    row, place, encoder = open_row(recipe, choice, overrides=overrides or (), context=context)
    checks = check_row(row)
    _print_row(row, checks)
    page = output / f"{place.stem}.html"
    write_row(row, checks, encoder, page, source=str(recipe))
    say(f"page     {page}")
    if any(check.fails for check in checks):
        raise typer.Exit(1)


def _print_row(row: ShownRow, checks: Sequence[Check]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from vlmpack.report.inspect.page import COLUMNS, WORDS, table_rows, totals

    console = open_console(piped=PIPED_WIDTH, highlight=False)
    console.print(escape(row.shown.title), style="bold")
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        is_word = name in WORDS
        table.add_column(
            name,
            justify="left" if is_word else "right",
            no_wrap=name != "key",
            overflow="fold" if name == "key" else "ellipsis",
        )
    rows = table_rows(row)
    for cells in rows[:MAX_ROWS]:
        table.add_row(*map(escape, cells))
    console.print(table)
    if len(rows) > MAX_ROWS:
        console.print(f"and {len(rows) - MAX_ROWS} more")
    for line in row.shown.left_out():
        console.print(escape(line), soft_wrap=True)
    console.print("; ".join(map(" ".join, totals(row).items())), markup=False)
    for check in checks:
        mark, style = ("\u2717", "bold red") if check.fails else ("\u2713", "green")
        console.print(
            f"[{style}]{mark}[/] {escape(check.name)}: {escape(check.sentence)}", soft_wrap=True
        )
