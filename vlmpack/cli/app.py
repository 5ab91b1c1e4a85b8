"""`vlmpack`: all commands, the last lines of a run, and the exit codes.

This is the one place where errors become messages. Before the first step, the processes of a node
mostly fail with the same error. The first one that fails leaves a file behind, named after its
launcher and its message. Another process with the same message in the next minute points at it.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import logging
import os
import stat
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmpack.activity import ACTIVITY
from vlmpack.cli.chat import chat
from vlmpack.cli.compare import compare
from vlmpack.cli.data import app as data_app
from vlmpack.cli.doctor import doctor
from vlmpack.cli.export import export, merge
from vlmpack.cli.families import families
from vlmpack.cli.generate import generate
from vlmpack.cli.index import index
from vlmpack.cli.inspect import inspect
from vlmpack.cli.options import (
    Commands,
    Overrides,
    RecipePath,
    example,
    launcher_number,
    option,
    quiet_transformers,
)
from vlmpack.cli.pack import pack, reference
from vlmpack.cli.plan import plan
from vlmpack.cli.recipe import app as recipe_app
from vlmpack.cli.replay import replay
from vlmpack.cli.sample import sample
from vlmpack.cli.verify import verify
from vlmpack.collector import collector_paused
from vlmpack.errors import Preempted, VlmpackError, naming_full_table
from vlmpack.interrupt import interrupt_ends_at_once
from vlmpack.terminal import PrintableFormatter, open_console, say, say_printable
from vlmpack.training.trackers import THREADS as TRACKER_THREADS
from vlmpack.version import __version__
from vlmpack.waits import logged_waits
from vlmpack.watchdog import SECONDS, Watchdog, process_name
from vlmpack.whole_file import not_world_writable
from vlmpack.words import counted

if TYPE_CHECKING:
    from vlmpack.api import FinetuneResult


FRESH_SECONDS = 60
"""Processes of one launch refuse within so long of each other."""


def rank_that_said(text: str, rank: int) -> str | None:
    """Which other process of this node has just said so; None where this one is to say it.

    Args:
        text: of the error.
        rank: of this process.
    """
    launch = [str(os.getppid())]  # the launcher; a restart by it is another launch
    launch += [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
    words = "\n".join([*launch, text])
    name = hashlib.blake2b(words.encode("utf-8", "replace"), digest_size=16).hexdigest()
    try:
        return _claim(_own_folder() / name, rank)
    except OSError:
        return None


def _own_folder() -> Path:
    """This user's, which no other can write in; old files are removed from it.

    Raises:
        OSError: there is none, or it is somebody else's.
    """
    folder = Path(tempfile.gettempdir(), f"vlmpack-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is not this user's alone")
    for path in folder.iterdir():
        if time.time() - path.lstat().st_mtime > FRESH_SECONDS:
            path.unlink(missing_ok=True)
    return folder


def _claim(path: Path, rank: int) -> str | None:
    try:
        with path.open("x", encoding="ascii") as file:
            file.write(str(rank))
        return None
    except FileExistsError:
        said = path.read_text(encoding="ascii") or "another one"  # which is about to write
    return None if said == str(rank) else said


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
app.command(epilog=example("vlmpack chat --model exported"))(chat)
app.command(epilog=example("vlmpack index 'shards/*.tar' --recipe recipe.yaml"))(index)
app.command(epilog=example("vlmpack pack recipe.yaml -o packs"))(pack)
app.command(epilog=example("vlmpack inspect recipe.yaml --row 0"))(inspect)
app.command(epilog=example("vlmpack plan recipe.yaml --world-size 8"))(plan)
app.command(epilog=example("vlmpack reference recipe.yaml"))(reference)
app.command(epilog=example("vlmpack verify recipe.yaml --tiny"))(verify)
app.command(epilog=example("vlmpack replay runs/mine/dumps/step-00000012.json"))(replay)
app.command(epilog=example("vlmpack sample recipe.yaml --reward exact -o rollouts"))(sample)
app.command(epilog=example("vlmpack families path/to/model"))(families)
app.command(epilog=example("vlmpack compare runs/before runs/after"))(compare)
app.command(epilog=example("vlmpack doctor --json"))(doctor)


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, option("root.version", callback=_print_version)] = False,
) -> None:
    """Finetune vision-language models on packed sequences."""
    context.with_resource(not_world_writable())
    # Every command is watched from here; a run has a watchdog of its own, with its recipe's knob.
    who = process_name(_rank(), launcher_number("WORLD_SIZE", 1) or 1)
    say_as_error = partial(say_printable, level=logging.ERROR)  # ranks but the first show no less
    context.with_resource(Watchdog(ACTIVITY, SECONDS, who=who, say=say_as_error, last_resort=True))


@app.command(epilog=example("vlmpack finetune recipe.yaml training.max_steps=20"))
def finetune(
    recipe: RecipePath,
    overrides: Overrides = None,
) -> None:
    """Finetune as a recipe says. The same command resumes. Runs under torchrun too."""
    from vlmpack.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or (), world_size=launcher_number("WORLD_SIZE", 1))
    from vlmpack.build.worker_server import start_worker_server

    with interrupt_ends_at_once(), collector_paused():
        start_worker_server(loaded)  # beside the imports below
        quiet_transformers()
        from vlmpack.api import import_for, run_recipe  # its problems show without torch

        import_for(loaded)
    gc.freeze()  # this process imports for one run, so no collection looks through it again
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
    error = sys.exception()
    code = error.code if isinstance(error, SystemExit) else int(error is not None)
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
    kind = "" if isinstance(error, Preempted) else "error: "  # a clean stop is none
    if "WORLD_SIZE" not in os.environ:
        return f"{kind}{error}"
    said = rank_that_said(str(error), _rank()) if ACTIVITY.step == 0 else None
    return f"[rank {_rank()}] {kind}{error if said is None else f'the same as rank {said} has'}"


def print_result(result: FinetuneResult) -> None:
    """Print where everything is, and the figures that matter."""
    from rich.table import Table

    from vlmpack.data.loading.ledger import LEDGER_NAME

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("steps", f"{result.steps:,} in {result.train_seconds:,.0f} s of training")
    table.add_row("speed", f"{result.tokens_per_second:,.0f} real tokens/s")
    saved = 1 - result.real_tokens / max(1, result.padded_tokens)
    table.add_row(
        "tokens",
        f"{result.real_tokens:,} real; padded rows would hold {result.padded_tokens:,} "
        f"({saved:.0%} padding)",
    )
    if skipped := result.figures.get("skipped_samples"):
        samples = counted(skipped + result.figures["samples"], "sample")
        table.add_row(
            "skipped",
            f"{skipped:,} of the {samples} that these steps asked for: {LEDGER_NAME} lists them",
        )
    if steps := result.figures.get("skipped_steps"):
        table.add_row("not finite", f"{counted(steps, 'step')}, skipped: see dumps/ of the run")
    for name, share in result.metrics_after.items():
        before = result.metrics_before.get(name)
        start = "" if before is None else f"{before:.1%} -> "
        table.add_row(name.replace("_", " "), f"{start}{share:.1%} on the test split")
    adapter = result.run_dir / "adapter"
    places = (
        ("model", result.export),
        ("adapter", adapter if adapter.is_dir() else None),
        ("report", result.report),
    )
    for name, path in places:
        if path is not None:
            table.add_row(name, str(path))
    table.add_row("run", str(result.run_dir))
    open_console().print(table)
