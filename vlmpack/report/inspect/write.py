"""`Row` -> its PNG and its HTML page in a folder; each file appears whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vlmpack.encode import Encoder
from vlmpack.errors import VlmpackError
from vlmpack.proof.check import Check
from vlmpack.proof.rows.shown import ShownRow
from vlmpack.report.inspect.page import render_page
from vlmpack.report.inspect.png import write_png
from vlmpack.report.inspect.sheet import draw_row
from vlmpack.training.run_dir import write_atomically


class Written(NamedTuple):
    """The two files."""

    picture: Path
    page: Path


def write_row(
    row: ShownRow,
    checks: Sequence[Check],
    encoder: Encoder,
    *,
    folder: Path,
    stem: str,
    source: str,
) -> Written:
    """Write `STEM.png` and `STEM.html`.

    Args:
        row: what to show.
        checks: of the row.
        encoder: that made it.
        folder: made if missing.
        stem: of the file names.
        source: the recipe, for the head.

    Raises:
        VlmpackError: the folder cannot be written.
    """
    written = Written(folder / f"{stem}.png", folder / f"{stem}.html")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_png(draw_row(row, checks, source), written.picture)
        write_atomically(written.page, render_page(row, checks, encoder, source))
    except OSError as error:
        raise VlmpackError(f"{folder} cannot be written: {error.strerror or error}") from error
    return written
