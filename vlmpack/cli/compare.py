"""`vlmpack compare`: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlmpack.activity import ACTIVITY
from vlmpack.cli.plan import print_sections
from vlmpack.errors import VlmpackError, writing
from vlmpack.terminal import say


def compare(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, A.")],
    other: Annotated[Path, typer.Argument(metavar="RUN", help="Another one, B.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write a page with the curves, too."),
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Largest difference of two losses, relative to them, that is taken for noise.",
            show_default="1e-5 in float32, 5e-3 in float16, 2e-2 in bfloat16",
        ),
    ] = None,
) -> None:
    """Show two runs side by side: losses by samples seen and by step, where they part, final
    figures, what differs. Reads the run folders alone."""
    from vlmpack.report.compare import compare_runs, sections, write_page

    ACTIVITY.enter_alone("reading the run folders")

    if output is not None and not output.absolute().parent.is_dir():
        raise VlmpackError(f"{output}: the folder {output.absolute().parent} does not exist")
    found = compare_runs(run, other, noise=noise)
    print_sections(sections(found))
    if output is not None:
        with writing(output):
            write_page(found, output)
        say(f"page: {output}", err=True)
