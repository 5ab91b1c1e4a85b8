"""`vlmpack compare`: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from vlmpack.activity import ACTIVITY
from vlmpack.cli.options import argument, option
from vlmpack.cli.plan import print_sections
from vlmpack.errors import VlmpackError, writing
from vlmpack.terminal import say


def compare(
    run: Annotated[Path, argument("compare.run")],
    other: Annotated[Path, argument("compare.other")],
    output: Annotated[Path | None, option("compare.output")] = None,
    noise: Annotated[float | None, option("compare.noise")] = None,
) -> None:
    """Show two runs side by side. The tables hold losses by samples seen and by step, where they
    part, final figures and what differs. Reads the run folders alone."""
    from vlmpack.report.compare import compare_runs, sections, write_page

    ACTIVITY.enter_alone("reading the run folders")

    if output is not None and not output.absolute().parent.is_dir():
        raise VlmpackError(f"{output}: the folder {output.absolute().parent} does not exist")
    comparison = compare_runs(run, other, noise=noise)
    print_sections(sections(comparison))
    if output is not None:
        with writing(output):
            write_page(comparison, output)
        say(f"page: {output}", err=True)
