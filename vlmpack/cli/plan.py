"""`vlmpack plan`: what a run would do, before anything is paid for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from vlmpack.activity import ACTIVITY
from vlmpack.cli.options import (
    Overrides,
    RecipeOrRun,
    WorldSize,
    note_of_run,
    on_processes,
    option,
    takes,
)
from vlmpack.cli.progress import Bars
from vlmpack.errors import VlmpackError, writing
from vlmpack.terminal import open_console, say

if TYPE_CHECKING:
    from rich.console import Console

    from vlmpack.report.forecast import Section

MIN_WORDS = 14
"""Characters of a line that words which fold have at least, where there is room."""


@dataclass(frozen=True)
class AssumedLinks:
    """The assumed links between GPUs."""

    gpus_per_node: Annotated[int, option("plan.gpus_per_node")] = 8
    node_gbs: Annotated[float, option("plan.node_gbs")] = 300.0
    network_gbs: Annotated[float, option("plan.network_gbs")] = 40.0


@dataclass(frozen=True)
class Measuring:
    """Whether the first steps are run, and how long."""

    measure: Annotated[bool, option("plan.measure")] = False
    measure_seconds: Annotated[float, option("plan.measure_seconds")] = 10.0
    choices: Annotated[bool, option("plan.choices")] = True


ASSUMED, UNMEASURED = AssumedLinks(), Measuring()


@takes(AssumedLinks, Measuring)
def plan(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    world_size: WorldSize = None,
    html: Annotated[Path | None, option("plan.html")] = None,
    as_json: Annotated[Path | None, option("plan.as_json")] = None,
    full_rows: Annotated[bool, option("plan.full_rows")] = False,
    assumed: AssumedLinks = ASSUMED,
    measuring: Measuring = UNMEASURED,
) -> None:
    """Show what a run would do. The tables hold steps, padding under every packing mode, samples in
    a row, balance across ranks, batch, memory and what ranks send. Needs no GPU without --measure,
    and indexes what is not indexed yet."""
    loaded, processes = on_processes(recipe, overrides, world_size)
    for file in (html, as_json):
        if file is not None and str(file) != "-" and not file.absolute().parent.is_dir():
            raise VlmpackError(f"{file}: the folder {file.absolute().parent} does not exist")
    from vlmpack.forecast.communication import Links
    from vlmpack.forecast.open import plan_recipe
    from vlmpack.report.forecast import as_json as to_json
    from vlmpack.report.forecast import sections, write_page

    links = Links(**asdict(assumed))
    ACTIVITY.enter_alone("opening the data, and planning")

    with Bars() as bar:
        made = plan_recipe(
            loaded, world_size=processes, progress=bar, links=links, full_rows=full_rows
        )
    if measuring.measure:
        from vlmpack.forecast.measure import measure_plan

        made = measure_plan(
            loaded,
            made,
            seconds=measuring.measure_seconds,
            others=measuring.choices,
            tell=lambda line: say(line, err=True),
        )
    content = json.dumps(to_json(made), indent=1)
    if str(as_json) == "-":
        say(content)
    else:
        print_sections(sections(made))
    if note := note_of_run(loaded):
        say(f"note: {note}", err=True)
    if as_json is not None and str(as_json) != "-":
        with writing(as_json):
            as_json.write_text(content + "\n", encoding="utf-8")
        say(f"json: {as_json}", err=True)
    if html is not None:
        with writing(html):
            write_page(made, html, title=str(recipe))
        say(f"page: {html}", err=True)


def print_sections(page: Sequence[Section], console: Console | None = None) -> None:
    """The page as tables, as wide as the terminal."""
    from rich.table import Table
    from rich.text import Text

    console = console or open_console(piped=100, highlight=False)
    for number, section in enumerate(page):
        if number:
            console.print()
        console.print(Text(section.title, style="bold"))
        if section.rows:
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
            table.add_column("", width=1)
            is_tall = any("\n" in column.name for column in section.columns)
            for place, column in enumerate(section.columns):
                table.add_column(
                    Text(column.name),
                    justify="left" if column.is_text else "right",
                    width=_room_for_names(section, console.width) if place == 0 else None,
                    no_wrap=not column.is_text,
                    overflow="fold",
                    vertical="bottom" if is_tall else "top",
                )
            for place, row in enumerate(section.rows):
                marked = place in section.marked
                table.add_row(
                    "*" if marked else "", *map(Text, row), style="bold" if marked else None
                )
            console.print(table)
        for line in section.lines:
            console.print(_hanging(line, console.width), soft_wrap=False)
    if any(section.marked for section in page):
        console.print(Text("\n* what the recipe has", style="dim"))


def _room_for_names(section: Section, width: int) -> int | None:
    """Characters of a line for the first column, which names the rows.

    It gets all that it needs if figures then stay whole and words have a little room to fold in.
    None if no room is left.
    """
    texts = zip(*section.rows, strict=True)
    needed = [
        max(map(len, (*column.name.split("\n"), *cells)))
        for column, cells in zip(section.columns, texts, strict=True)
    ]
    others = [
        min(need, MIN_WORDS) if column.is_text else need
        for column, need in zip(section.columns[1:], needed[1:], strict=True)
    ]
    mark, gap = 1, 2
    room = width - mark - sum(others) - gap * (1 + len(others))
    return min(needed[0], room) if room >= MIN_WORDS else None


def _hanging(line: str, width: int) -> str:
    """A sentence wrapped under its first word."""
    from textwrap import fill

    from rich.markup import escape

    return escape(fill(line, max(40, width - 1), initial_indent="  ", subsequent_indent="    "))
