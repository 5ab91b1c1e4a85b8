"""index.html: one file that needs nothing beside it; all text is escaped."""

from __future__ import annotations

from collections.abc import Mapping

from vlmpack.report.by_step import Images, followed, metric_rows
from vlmpack.report.document import render
from vlmpack.report.run_files import RunFiles
from vlmpack.report.tables import facts, headline, metric_tables, spread_rows, validation_rows

PICTURES = {
    "loss.png": "Loss of every step, smoothed, with validation and learning rate",
    "samples.png": "Test questions with the finetuned model's answers",
    "lengths.png": "Sample lengths, and one micro-batch padded and packed to scale",
}
"""File -> what a reader who cannot see it is told, in the page's order."""


def render_page(run: RunFiles, drawn: Mapping[str, bytes | None], images: Images) -> str:
    """The page as HTML.

    Args:
        run: the run's files.
        drawn: the pictures by file; those that the run has nothing for are left out.
        images: of the questions that are shown.
    """
    by_step_head, by_step = metric_rows(run)
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
        pictures=[(drawn[name], text) for name, text in PICTURES.items() if drawn[name]],
        followed=followed(run, images),
        tables=[
            *(
                (
                    f"{metric.replace('_', ' ').capitalize()} by task",
                    ("task", "counted", "before", "after"),
                    rows,
                )
                for metric, rows in metric_tables(run).items()
            ),
            ("Metrics by step", by_step_head, by_step),
            ("Validation", ("figure", "before", "after"), validation_rows(run)),
            (
                "While training",
                ("each step", "least", "median", "most"),
                spread_rows(run),
            ),
            ("The run", (), facts(run.result)),
        ],
    )
