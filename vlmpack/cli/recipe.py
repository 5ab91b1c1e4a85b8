"""`vlmpack recipe check | show | schema`: look at a recipe without running it."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from vlmpack.recipe import derived_rows, dump_recipe, json_schema, load_recipe, notes
from vlmpack.terminal import open_console, say

app = typer.Typer(no_args_is_help=True, help="Check a recipe, show it resolved, print its schema.")

RecipePath = Annotated[str, typer.Argument(metavar="RECIPE", help="Path of a YAML recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, e.g. training.max_steps=20."),
]
WorldSize = Annotated[
    int,
    typer.Option(
        "--world-size", envvar="WORLD_SIZE", min=1, help="Number of processes the run will have."
    ),
]


@app.command()
def check(recipe: RecipePath, overrides: Overrides = None, world_size: WorldSize = 1) -> None:
    """List every problem of a recipe, or say OK and print what follows from it."""
    loaded = load_recipe(recipe, overrides or (), world_size=world_size)
    console = open_console()
    console.print(f"[green]OK[/green] {escape(recipe)}", highlight=False, soft_wrap=True)
    table = Table("derived", "value", "from")
    table.columns[1].justify = "right"
    for row in derived_rows(loaded, world_size):
        table.add_row(row.name, str(row.value), row.formula)
    console.print(table)
    for note in notes(loaded, world_size):
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    unopened = (
        "not checked: model folder and data, which a launch opens; `vlmpack plan` opens them now"
    )
    console.print(unopened, highlight=False, soft_wrap=True)


@app.command()
def show(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Print the resolved recipe as YAML: every key, defaults and overrides included."""
    say(dump_recipe(load_recipe(recipe, overrides or ())), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON schema of a recipe, for editors."""
    say(json.dumps(json_schema(), indent=2))
