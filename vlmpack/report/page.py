"""index.html: one file that needs nothing beside it; all text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vlmpack.report.by_step import about_steps, best_row, followed, metric_rows
from vlmpack.report.document import render
from vlmpack.report.lengths_picture import lengths_pictures
from vlmpack.report.loss_picture import loss_picture
from vlmpack.report.run_files import RunFiles
from vlmpack.report.samples_picture import Images, head, sample_cards
from vlmpack.report.tables import facts, headline, metric_tables, spread_rows, validation_rows


class Table(NamedTuple):
    """A table of the page.

    Args:
        title: above it.
        heads: see `heads`.
        rows: as many texts each; without any the table is left out.
        marked: places of rows that stand out.
        line: a sentence below.
    """

    title: str
    heads: list[tuple[str, bool]]
    rows: Sequence[tuple[str, ...]]
    marked: tuple[int, ...] = ()
    line: str = ""


def render_page(run: RunFiles, images: Images) -> str:
    """The page as HTML.

    Args:
        run: the run's files.
        images: of the questions that are shown.

    Raises:
        CapabilityError: matplotlib is not installed.
    """
    by_step_head, by_step = metric_rows(run)
    right_of, cards = sample_cards(run, images)
    loss = loss_picture(run)
    model, finished = run.result.get("model"), run.result.get("finished")
    about = (
        f"finetuned from {model}" if model else "",
        f"finished {finished}" if finished else "",
        "" if run.result else "no result.json: the run is not finished",
    )
    return render(
        "run.html",
        run=run,
        about=[part for part in about if part],
        figures=headline(run),
        pictures=[*([loss] if loss else []), *lengths_pictures(run)],
        asked="; ".join(filter(None, head(run))),
        right_of=right_of,
        cards=cards,
        followed=followed(run, images),
        about_steps=about_steps(run),
        tables=[
            *(
                Table(
                    f"{metric.replace('_', ' ').capitalize()} by task",
                    heads("task", "counted", "before", "after"),
                    rows,
                )
                for metric, rows in metric_tables(run).items()
            ),
            Table("Metrics by step", heads(*by_step_head), by_step, *best_row(run, by_step)),
            Table("Validation", heads("figure", "before", "after"), validation_rows(run)),
            Table(
                "While training", heads("each step", "least", "median", "most"), spread_rows(run)
            ),
            Table("The run", [("", True), ("", True)], facts(run.result)),
        ],
    )


def heads(first: str, *others: str) -> list[tuple[str, bool]]:
    """A table with words in its first column and figures in the others."""
    return [(first, True), *((name, False) for name in others)]
