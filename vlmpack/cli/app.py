"""`vlmpack`: all commands, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import threading
from functools import partial
from importlib import import_module
from typing import Annotated

import typer

from vlmpack.activity import ACTIVITY
from vlmpack.cli.commands import Commands, example
from vlmpack.cli.compare import compare
from vlmpack.cli.data import app as data_app
from vlmpack.cli.doctor import doctor
from vlmpack.cli.export import export
from vlmpack.cli.families import families
from vlmpack.cli.generate import generate
from vlmpack.cli.index import index
from vlmpack.cli.inspect import inspect
from vlmpack.cli.merge import merge
from vlmpack.cli.options import Overrides, RecipePath, launcher_number
from vlmpack.cli.pack import pack
from vlmpack.cli.plan import plan
from vlmpack.cli.recipe import app as recipe_app
from vlmpack.cli.reference import reference
from vlmpack.cli.said_once import rank_that_said
from vlmpack.cli.verify import verify
from vlmpack.errors import VlmpackError, naming_full_table
from vlmpack.interrupt import interrupt_ends_at_once
from vlmpack.terminal import PrintableFormatter, say, say_printable
from vlmpack.training.trackers import THREADS as TRACKER_THREADS
from vlmpack.version import __version__
from vlmpack.waits import logged_waits
from vlmpack.watchdog import SECONDS, Watchdog, process_name

EXIT_SECONDS = 10.0
"""What a tracker that does not come back has to let Python end."""


def _print_version(asked: bool) -> None:
    if asked:
        say(f"vlmpack {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    epilog=example("vlmpack recipe new digits-demo"),
)
app.add_typer(recipe_app, name="recipe")
app.add_typer(data_app, name="data")
app.command(epilog=example("vlmpack export runs/mine --merge -o merged"))(export)
app.command(epilog=example("vlmpack merge base adapters -o merged"))(merge)
app.command(epilog=example("vlmpack generate 'What is this?' --model exported --image photo.jpg"))(
    generate
)
app.command(epilog=example("vlmpack index 'shards/*.tar' --recipe recipe.yaml"))(index)
app.command(epilog=example("vlmpack pack recipe.yaml -o packs"))(pack)
app.command(epilog=example("vlmpack inspect recipe.yaml --row 0"))(inspect)
app.command(epilog=example("vlmpack plan recipe.yaml --world-size 8"))(plan)
app.command(epilog=example("vlmpack reference recipe.yaml"))(reference)
app.command(epilog=example("vlmpack verify recipe.yaml --tiny"))(verify)
app.command(epilog=example("vlmpack families path/to/model"))(families)
app.command(epilog=example("vlmpack compare runs/before runs/after"))(compare)
app.command(epilog=example("vlmpack doctor --json"))(doctor)


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Finetune vision-language models on packed sequences."""
    # Every command is watched from here; a run has a watchdog of its own, with its recipe's knob.
    who = process_name(_rank(), launcher_number("WORLD_SIZE", 1) or 1)
    say_as_error = partial(say_printable, level=logging.ERROR)  # ranks but the first show no less
    context.with_resource(Watchdog(ACTIVITY, SECONDS, who=who, say=say_as_error, last_resort=True))


@app.command(epilog=example("vlmpack finetune recipe.yaml training.max_steps=20"))
def finetune(
    recipe: RecipePath,
    overrides: Overrides = None,
) -> None:
    """Finetune as a recipe says; the same command resumes. Runs under torchrun too."""
    from vlmpack.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or (), world_size=launcher_number("WORLD_SIZE", 1))
    from vlmpack.build.worker_server import start_worker_server

    with interrupt_ends_at_once():
        start_worker_server(loaded)  # beside the imports below
        from transformers.utils import logging as transformers_logging

        from vlmpack.api import run_recipe  # after the recipe: its problems show without torch
        from vlmpack.cli.summary import print_result

        for name in ("vlmpack.report", "vlmpack.run.launch"):  # what run_recipe imports
            import_module(name)

    transformers_logging.disable_progress_bar()
    result = run_recipe(loaded)
    if _rank() == 0:
        print_result(result)


def _rank() -> int:
    return launcher_number("RANK", 0) or 0


def main() -> None:
    """Run the command line; exit code 0, 1 (error), 2 (recipe or usage), 75 (preempted),
    130 (interrupted)."""
    # Else the end collects garbage among all the objects of torch and transformers: two seconds.
    atexit.register(gc.freeze)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logger = logging.getLogger("vlmpack")
    logger.setLevel(logging.INFO if _rank() == 0 else logging.ERROR)
    try:
        with naming_full_table(), logged_waits():
            app(prog_name="vlmpack")  # under `python -m` too: shells complete that name
    except VlmpackError as error:
        say(_in_one_voice(error), err=True)
        sys.exit(error.exit_code)
    finally:
        _leave_in_time()


def _leave_in_time() -> None:
    """A tracker that does not come back may keep Python from ending as well, by what it does at
    exit: the process ends beside it."""
    if not any(thread.name.startswith(TRACKER_THREADS) for thread in threading.enumerate()):
        return
    left = sys.exception()
    code = left.code if isinstance(left, SystemExit) else int(left is not None)
    code = code if isinstance(code, int) else int(code is not None)

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    timer = threading.Timer(EXIT_SECONDS, leave)
    timer.daemon = True
    timer.start()


def _in_one_voice(error: VlmpackError) -> str:
    """What this process says of an error: before the first step all of them mostly have the same,
    and one of them says it."""
    if "WORLD_SIZE" not in os.environ:
        return f"error: {error}"
    said = rank_that_said(str(error), _rank()) if ACTIVITY.step == 0 else None
    return f"[rank {_rank()}] error: {error if said is None else f'the same as rank {said} has'}"
