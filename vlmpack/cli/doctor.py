"""`vlmpack doctor`: what is installed, what would run here, and why not something else."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Annotated

from rich.markup import escape
from rich.table import Table

from vlmpack.activity import ACTIVITY
from vlmpack.cli.options import option
from vlmpack.terminal import open_console, say
from vlmpack.version import __version__


def doctor(
    as_json: Annotated[bool, option("doctor.as_json")] = False,
) -> None:
    """Print versions, devices, the kernels that would be chosen here and why not others, and what
    else a bug report needs. It holds no secret and no path of yours."""
    from vlmpack.run import doctor as work

    ACTIVITY.enter_alone("importing each package that is installed")

    lines = work.look()
    if as_json:
        say(json.dumps({"vlmpack": __version__, "lines": work.as_json(lines)}, indent=1))
        return
    console = open_console()
    console.print(f"vlmpack {__version__}", highlight=False)
    for section, of in groupby(lines, key=lambda line: line.section):
        table = Table(section, "found", "note")
        for line in of:
            found = f"[red]{escape(line.found)}[/red]" if line.is_bad else escape(line.found)
            table.add_row(escape(line.name), found, escape(line.note))
        console.print(table)
    bad = [line.name for line in lines if line.is_bad]
    if bad:
        console.print(f"look at: {', '.join(bad)}", highlight=False, markup=False)
