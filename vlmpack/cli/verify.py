"""`vlmpack verify`: does the packed row compute what each sample computes alone?"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vlmpack.activity import ACTIVITY
from vlmpack.cli.options import (
    Overrides,
    RecipeOrRun,
    launcher_number,
    load,
    option,
    quiet_transformers,
)
from vlmpack.terminal import columns, open_console, say

if TYPE_CHECKING:
    from vlmpack.proof.verify import Verification

WIDEST = 10_000
"""Characters that a line may have where no terminal says."""


def _samples(said: str | int) -> int:
    """Two at least: one sample shares its row with nobody."""
    if not str(said).isdecimal() or int(said) < 2:
        raise typer.BadParameter(f"found {said}, expected 2 or more")
    return int(said)


def verify(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    samples: Annotated[int, option("verify.samples", parser=_samples)] = 8,
    dtype: Annotated[Literal["float32", "recipe"], option("verify.dtype")] = "float32",
    tiny: Annotated[bool, option("verify.tiny")] = False,
    output: Annotated[Path | None, option("verify.output")] = None,
) -> None:
    """Show that packed samples compute what each computes alone. Exit code 1 if they do not.

    Compares the stock model on each sample alone with the recipe's engine on the packed row.

    Nothing is trained. Runs under torchrun too, with the recipe's parallelism.
    """
    loaded = load(recipe, overrides, launcher_number("WORLD_SIZE", 1))
    folder = output if output is not None else Path(loaded.run_dir) / "verify"
    from vlmpack.proof.verify import VerifyOptions, verify_recipe
    from vlmpack.proof.verify.run import write_verification
    from vlmpack.run.place import watched_ranks

    quiet_transformers()
    with watched_ranks(loaded) as ranks:
        ACTIVITY.enter_alone("opening model and data")
        ranks.on_main(lambda: _require_folder(folder))
        options = VerifyOptions(num_samples=samples, dtype=dtype, tiny=tiny, scratch=folder)
        verification = verify_recipe(loaded, ranks, options)
        path = ranks.on_main(lambda: write_verification(verification, folder))
        if ranks.is_main:
            _print(verification, path)
    if not verification.passes:
        raise typer.Exit(1)


def _require_folder(folder: Path) -> None:
    """See that results can be written, before minutes of work."""
    from vlmpack.errors import RunDirError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunDirError(
            f"verify.json cannot be written to {folder}: {error.strerror}; choose another folder "
            f"with --output"
        ) from error


def _print(verification: Verification, path: Path) -> None:
    from rich.table import Table
    from rich.text import Text

    from vlmpack.proof.verify.run import conclusion
    from vlmpack.report.verify import COLUMNS, head, table_rows

    console = open_console(highlight=False)
    room, console.width = columns(console.file) or WIDEST, WIDEST
    rows = table_rows(verification)
    for line in head(verification):
        console.print(Text(line), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in COLUMNS[:-1]:
        number = name in ("found", "bound", "unpacked")
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    styles = {"pass": "green", "FAIL": "bold red"}
    for mark, *cells, _ in rows:
        table.add_row(Text(mark, style=styles.get(mark, "yellow")), *map(Text, cells))
    with console.capture() as captured:
        console.print(table)
    lines, details = captured.get().splitlines(), [COLUMNS[-1], *(row[-1] for row in rows)]
    is_narrow = len(Text.from_ansi(lines[0])) + 2 + max(map(len, details)) > room
    between = "\n      " if is_narrow else "  "
    for line, detail in zip(lines, details, strict=True):
        whole = Text.from_ansi(line)
        if is_narrow:
            whole.rstrip()
        whole.append(f"{between}{detail}").rstrip()
        console.print(whole, soft_wrap=True)
    console.print(Text(f"json      {path}"), soft_wrap=True)
    # The last line is for scripts too: plain, and never broken.
    say(conclusion(verification), whole=True)
