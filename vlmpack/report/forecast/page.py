"""One HTML file: the pictures, then every table. It needs nothing beside it; text is escaped."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from vlmpack.forecast.figures import RunPlan
from vlmpack.report.document import SHEET, figure_list, html_document
from vlmpack.report.forecast.numbers import compact, share
from vlmpack.report.forecast.pictures import Picture, draw_pictures
from vlmpack.report.forecast.section import Section
from vlmpack.report.forecast.sections import sections
from vlmpack.training.run_dir import write_atomically
from vlmpack.words import counted

_STYLE = f"""{SHEET}
body {{ max-width: 64rem; }} .figures div {{ min-width: 8rem; }}
.pictures {{ display: grid; gap: 0 2rem;
            grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }}
figure {{ margin: 2rem 0 0; max-width: 34rem; }} img {{ display: block; }}
figure h2 {{ margin: 0 0 .3rem; }} figcaption {{ color: #6b7785; font-size: .85rem; }}
.wide {{ overflow-x: auto; }} table {{ min-width: 100%; }}
th, td {{ text-align: right; padding: .3rem 0 .3rem 1rem;
         white-space: nowrap; font-variant-numeric: tabular-nums; }}
th.t, td.t {{ text-align: left; padding-right: 1rem; }}
th:first-child, td:first-child {{ padding-left: 0; }}
tr.m td {{ background: #eef4fa; font-weight: 600; }}
p.line {{ color: #4a5663; font-size: .9rem; margin: .5rem 0 0; overflow-wrap: anywhere; }}
"""

MAX_SOURCES = 1000


def write_page(plan: RunPlan, path: Path, *, title: str) -> None:
    """Draw the pictures and write the page.

    Raises:
        CapabilityError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    write_atomically(path, render_page(plan, draw_pictures(plan), title=title))


def render_page(plan: RunPlan, pictures: list[Picture], *, title: str) -> str:
    """The page as HTML."""
    tables = [_table(section) for section in sections(plan, max_sources=MAX_SOURCES)]
    body = "\n".join(
        [_head(plan, title), _figures(plan), _pictures(pictures), *tables, _left(plan)]
    )
    return html_document(f"{escape(title)} - plan - vlmpack", _STYLE, body)


def _head(plan: RunPlan, title: str) -> str:
    return (
        f"<h1>{escape(title)}</h1>\n"
        f'<p class="from">plan of {escape(plan.model)}, packing.mode {escape(plan.mode.name)}, '
        f"{counted(plan.world_size, 'process', 'processes')}</p>"
    )


def _figures(plan: RunPlan) -> str:
    mode, none = plan.mode, plan.modes[0]
    shown = [
        ("samples", compact(plan.total.num_usable), f"{compact(plan.total.num_tokens)} tokens"),
        ("steps", f"{plan.run_steps:,}", f"{plan.steps_per_epoch:,} an epoch"),
        ("padding", share(mode.padding), f"{share(none.padding)} unpacked"),
        (
            "samples a step",
            compact(plan.batch.samples),
            f"{compact(plan.batch.tokens)} tokens",
        ),
    ]
    return figure_list(shown)


def _pictures(pictures: list[Picture]) -> str:
    items = "\n".join(
        f"<figure><h2>{escape(one.title)}</h2>"
        f'<img src="data:image/png;base64,{base64.b64encode(one.png).decode("ascii")}" '
        f'alt="{escape(one.caption)}"><figcaption>{escape(one.caption)}.</figcaption></figure>'
        for one in pictures
    )
    return f'<div class="pictures">\n{items}\n</div>'


def _table(section: Section) -> str:
    lines = "\n".join(f'<p class="line">{escape(line)}</p>' for line in section.lines)
    table = ""
    if section.rows:
        kinds = [' class="t"' if column.is_text else "" for column in section.columns]
        head = "".join(
            f"<th{kind}>{escape(' '.join(column.name.split()))}</th>"
            for kind, column in zip(kinds, section.columns, strict=True)
        )
        rows = "\n".join(
            ('<tr class="m">' if place in section.marked else "<tr>")
            + "".join(
                f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)
            )
            + "</tr>"
            for place, row in enumerate(section.rows)
        )
        table = f'<div class="wide"><table>\n<tr>{head}</tr>\n{rows}\n</table></div>\n'
    return f"<h2>{escape(section.title)}</h2>\n{table}{lines}"


def _left(plan: RunPlan) -> str:
    if not plan.left_out:
        return ""
    rows = "\n".join(
        f'<tr><td class="t">{escape(one.key)}</td><td class="t">{escape(one.shard)}</td>'
        f'<td class="t">{escape(one.reason)}</td></tr>'
        for one in plan.left_out
    )
    return (
        f"<h2>Not trained, the first {len(plan.left_out)}</h2>\n"
        '<div class="wide"><table>\n<tr><th class="t">key</th><th class="t">shard</th>'
        f'<th class="t">why</th></tr>\n{rows}\n</table></div>'
    )
