"""index.html: one file that needs nothing beside it; all text is escaped."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from vlmpack.report.document import SHEET, figure_list, html_document
from vlmpack.report.run_files import RunFiles
from vlmpack.report.tables import (
    Figure,
    SpreadRow,
    TaskRow,
    facts,
    headline,
    spread_rows,
    task_rows,
)

_STYLE = f"""{SHEET}
body {{ max-width: 56rem; }} .figures div {{ min-width: 9rem; }}
figure {{ margin: 2.2rem 0 0; }} table {{ width: 100%; }}
th, td {{ text-align: left; padding: .3rem .8rem .3rem 0;
         vertical-align: top; overflow-wrap: anywhere; }}
.n {{ text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }}
"""

PICTURES = (
    ("loss.png", "Loss of every step, smoothed, with validation and learning rate"),
    ("samples.png", "Test questions with the finetuned model's answers"),
    ("lengths.png", "Sample lengths, and one micro-batch padded and packed to scale"),
)
"""(file, what a reader who cannot see it is told), in the page's order."""


def render_page(run: RunFiles, folder: Path) -> str:
    """The page as HTML.

    Args:
        run: the run's files.
        folder: where the pictures lie; those that are missing are left out.
    """
    parts = [
        _head(run),
        _figures(headline(run)),
        *(_picture(folder / name, text) for name, text in PICTURES if (folder / name).is_file()),
        _tasks(task_rows(run)),
        _spreads(spread_rows(run)),
        _facts(facts(run.result)),
    ]
    body = "\n".join(part for part in parts if part)
    return html_document(f"{escape(run.name)} - vlmpack", _STYLE, body)


def _head(run: RunFiles) -> str:
    model = run.result.get("model")
    finished = run.result.get("finished")
    about = [
        f"finetuned from {escape(str(model))}" if model else "",
        f"finished {escape(str(finished))}" if finished else "",
        "" if run.result else "no result.json: the run is not finished",
    ]
    line = ", ".join(part for part in about if part)
    return f'<h1>{escape(run.name)}</h1>\n<p class="from">{line}</p>'


def _figures(figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    return figure_list((figure.name, figure.value, figure.note) for figure in figures)


def _picture(path: Path, text: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<figure><img src="data:image/png;base64,{data}" alt="{escape(text)}"></figure>'


def _tasks(rows: Sequence[TaskRow]) -> str:
    if not rows:
        return ""
    lines = "\n".join(
        f'<tr><td>{escape(row.name)}</td><td class="n">{row.num_questions}</td>'
        f'<td class="n">{row.before}</td><td class="n">{row.after}</td></tr>'
        for row in rows
    )
    return (
        "<h2>Exact answers by task</h2>\n<table>\n"
        '<tr><th>task</th><th class="n">questions</th><th class="n">before</th>'
        f'<th class="n">after</th></tr>\n{lines}\n</table>'
    )


def _spreads(rows: Sequence[SpreadRow]) -> str:
    if not rows:
        return ""
    lines = "\n".join(
        f'<tr><td>{escape(row.name)}</td><td class="n">{row.low}</td>'
        f'<td class="n">{row.middle}</td><td class="n">{row.high}</td></tr>'
        for row in rows
    )
    return (
        "<h2>While training</h2>\n<table>\n"
        '<tr><th>each step</th><th class="n">least</th><th class="n">median</th>'
        f'<th class="n">most</th></tr>\n{lines}\n</table>'
    )


def _facts(rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = "\n".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows
    )
    return f"<h2>The run</h2>\n<table>\n{lines}\n</table>"
