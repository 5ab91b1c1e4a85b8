"""`vlmpack recipe new | check | show | schema`: begin a recipe, look at one without running it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from vlmpack.activity import ACTIVITY
from vlmpack.cli.options import (
    Commands,
    Overrides,
    RecipePath,
    WorldSize,
    argument,
    example,
    note_of_run,
    on_processes,
    option,
)
from vlmpack.recipe import Recipe, derived_rows, dump_recipe, json_schema, load_recipe, notes
from vlmpack.recipe.load import located
from vlmpack.recipe.notes import check_trackers, registered_in
from vlmpack.recipe.objective import OBJECTIVES
from vlmpack.recipe.shipped import missing_paths, shipped_recipes, title, write_recipe
from vlmpack.terminal import open_console, say
from vlmpack.words import counted

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    epilog=example("vlmpack recipe check recipe.yaml"),
    help="Write a shipped recipe, check one, show it resolved, print the schema.",
)


@app.command(epilog=example("vlmpack recipe new digits-demo -o mine.yaml"))
def new(
    name: Annotated[str | None, argument("new.name")] = None,
    output: Annotated[Path | None, option("new.output")] = None,
) -> None:
    """Write a shipped recipe to be changed, by default into the working folder as NAME.yaml. A file
    that is there already stays as it is."""
    if name is None:
        table = Table("recipe", "what it is")
        listed = sorted(shipped_recipes().items(), key=lambda item: not item[0].startswith("my-"))
        for known, path in listed:
            yours = "for your data: " if known.startswith("my-") else ""
            table.add_row(known, f"{yours}{escape(title(path))}")
        open_console().print(table)
        return
    path = write_recipe(name, Path(f"{name}.yaml") if output is None else output)
    say(f"wrote {path}; next: vlmpack recipe check {path}")
    if missing := missing_paths(path):
        ours = any(path.startswith("assets/") for path in missing)
        where = "run it in the root of vlmpack's repository, which has assets/, or " if ours else ""
        say(
            f"not in this folder, where its paths start: {', '.join(missing)}; {where}name a model "
            "folder and data files of yours"
        )


@app.command(epilog=example("vlmpack recipe check recipe.yaml --world-size 8"))
def check(recipe: RecipePath, overrides: Overrides = None, world_size: WorldSize = None) -> None:
    """List every problem of a recipe, or say OK and print what follows from it."""
    from vlmpack.build.look import missing_places  # brings torch
    from vlmpack.training.objective import objective_of

    loaded, processes = on_processes(Path(recipe), overrides, world_size)
    check_trackers(loaded.logging)
    if loaded.objective.name in OBJECTIVES:  # a python: one comes with the program that runs
        objective_of(loaded.objective)
    model = "" if _checked_model(loaded) else "the model, what its family can do, "
    missing = located(missing_places(loaded), recipe, overrides or ())
    count = counted(len(missing), "thing")
    but = f", except for {count} not on this machine; a run here will stop:" if missing else ""
    console = open_console()
    console.print(f"[green]OK[/green] {escape(recipe)}{but}", highlight=False, soft_wrap=True)
    for line in missing:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    table = Table("derived", "value", "from")
    table.columns[1].justify = "right"
    for row in derived_rows(loaded, processes):
        table.add_row(row.name, str(row.value), row.formula)
    console.print(table)
    run_note = note_of_run(loaded)
    for note in (*notes(loaded, processes), *([run_note] if run_note else [])):
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    named = loaded.trainable.uses("lora") and loaded.trainable.lora.targets != "all-linear"
    unseen = named and (model or loaded.model.adapter is None)  # opened adapters have their layers
    layers = ", whether the model has the layers of trainable.lora.targets" if unseen else ""
    own = dict.fromkeys(f"python:{each.name}" for each in registered_in(loaded))
    handed = f", {', '.join(own)}, which a program hands to vlmpack.finetune" if own else ""
    unopened = (
        f"not checked: {model}the data{layers}{handed}. Run vlmpack plan {recipe} to check "
        f"{'them' if model or layers or handed else 'it'} too"
    )
    console.print(unopened, highlight=False, soft_wrap=True)


def _checked_model(recipe: Recipe) -> bool:
    """Whether the model folder is here; what is wrong with it is raised, as by a launch."""
    folder = Path(recipe.model.path)
    if not (folder / "config.json").is_file():
        return False
    from transformers.utils import logging as transformers_logging

    from vlmpack.build.data import build_encoder
    from vlmpack.build.engine import check_model, open_adapter, policy_of, with_adapter_layers
    from vlmpack.distributed import Ranks

    transformers_logging.disable_progress_bar()
    ACTIVITY.enter_alone("looking at the model folder")
    if any(folder.glob("*.safetensors")):
        check_model(folder, Ranks())
    if (folder / "tokenizer.json").is_file():
        encoder, adapter = build_encoder(recipe), recipe.model.adapter
        if adapter is not None and Path(adapter).is_dir():
            open_adapter(Path(adapter), policy_of(with_adapter_layers(recipe)), encoder)
    return True


@app.command(epilog=example("vlmpack recipe show recipe.yaml"))
def show(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Print the resolved recipe as YAML, with every key, defaults and overrides included."""
    say(dump_recipe(load_recipe(recipe, overrides or ())), nl=False)


@app.command(epilog=example("vlmpack recipe schema > schema.json"))
def schema() -> None:
    """Print the JSON schema of a recipe, for editors."""
    say(json.dumps(json_schema(), indent=2))
