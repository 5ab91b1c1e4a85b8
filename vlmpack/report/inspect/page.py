"""The HTML page: one file that needs nothing beside it; all text is escaped.

The row is drawn three times, for wide, medium and narrow pages; each image is in the page once.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from html import escape
from io import BytesIO

from PIL.Image import Image, Resampling

from vlmpack.encode import Encoder
from vlmpack.proof.check import Check
from vlmpack.proof.rows.shown import Segment, ShownRow
from vlmpack.proof.rows.view import SampleView
from vlmpack.report.document import render
from vlmpack.report.inspect.canvas import BAD, GOOD, Canvas
from vlmpack.report.inspect.colors import segment_color
from vlmpack.report.inspect.lanes import draw_lanes
from vlmpack.report.inspect.svg import svg, visible
from vlmpack.report.inspect.table import COLUMNS, Total, table_rows, totals

LAYOUTS = (("wide", 1480.0), ("medium", 860.0), ("narrow", 372.0))
"""(class, width in pixels at which it is drawn); the style sheet chooses."""

WORDS = ("key", "shard")
"""Columns of words; the others hold numbers."""

MAX_SIDE = 640
MAX_PNG_PIXELS = 1 << 16
"""Of an image in the page."""

MIN_SIDE = 96
"""Smaller images are enlarged by a whole factor."""

MAX_TEXT = 40_000
"""Characters of one run of text that are shown."""

_CSS = f"""
body {{ margin: 1.5rem auto; max-width: 1500px; padding: 0 1rem; color: #1f2933;
       font: 15px/1.45 system-ui, "DejaVu Sans", sans-serif; background: #fff; }}
h1 {{ font-size: 1.4rem; margin: 0; }} h2 {{ font-size: 1.1rem; margin: 2rem 0 .5rem; }}
h1, h2, h3, p, td {{ overflow-wrap: anywhere; }}
p.from {{ color: #5f6b78; margin: .1rem 0 1rem; }}
svg {{ display: none; width: 100%; height: auto;
      font-family: system-ui, "DejaVu Sans", sans-serif; }}
svg.store {{ display: block; position: absolute; width: 0; height: 0; }}
svg.wide {{ display: block; }}
ul.checks {{ list-style: none; padding: 0; margin: 0 0 1rem; }}
ul.checks li {{ display: grid; grid-template-columns: 1.5rem 18.5rem 1fr; }}
ul.checks .mark {{ font-weight: 700; }}
.good .mark {{ color: {GOOD}; }} .bad, .bad .mark {{ color: {BAD}; }}
dl {{ display: flex; flex-wrap: wrap; gap: .3rem 1.8rem; margin: 0 0 1rem; }}
dt {{ color: #5f6b78; display: inline; }} dd {{ display: inline; margin: 0; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .9rem; }}
th, td {{ text-align: left; padding: .15rem 1.1rem .15rem 0; border-bottom: 1px solid #e4e7eb; }}
th {{ font-weight: 600; color: #5f6b78; }} td.n, th.n {{ text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }}
td.w {{ min-width: 6rem; max-width: 24rem; }}
.swatch {{ display: inline-block; width: .8rem; height: .8rem; margin-right: .5rem; }}
.tail {{ background: repeating-linear-gradient(45deg, #8b96a3 0 1px, #f3f4f6 1px 4px); }}
.texts {{ display: grid; gap: 1.2rem 2rem; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); }}
section {{ border-left: 5px solid; padding: .1rem 0 .1rem .8rem; min-width: 0; }}
section h3 {{ font-size: 1rem; margin: 0 0 .3rem; }} h3 span {{ font-weight: 400; color: #5f6b78; }}
.text {{ white-space: pre-wrap; overflow-wrap: anywhere; max-height: 60rem; overflow-y: auto;
  font: 13px/1.6 ui-monospace, "DejaVu Sans Mono", monospace; unicode-bidi: isolate; }}
mark {{ background: #fbe0cc; color: inherit; box-shadow: inset 0 -2px {BAD}; }}
.special {{ color: #6b5aa8; font-size: .85em; }}
svg.image {{ display: block; margin: .2rem 0; max-height: 24rem; }}
.grid {{ color: #5b4a8a; }}
@media (max-width: 1250px) {{ svg.wide {{ display: none; }} svg.medium {{ display: block; }} }}
@media (max-width: 640px) {{ svg.medium {{ display: none; }} svg.narrow {{ display: block; }}
  body {{ padding: 0 .8rem; }}
  ul.checks li {{ grid-template-columns: 1.5rem 1fr; margin-bottom: .3rem; }}
  ul.checks li span:last-child {{ grid-column: 2; }} }}
"""


def render_page(row: ShownRow, checks: Sequence[Check], encoder: Encoder, source: str) -> str:
    """The page as HTML.

    Args:
        row: what to show.
        checks: of the row.
        encoder: that made it: its special tokens are marked in the texts.
        source: the recipe, for the head.
    """
    images = [_stored(image) for sample in row.shown.samples for image in sample.images]
    sizes = [image.size for image in images]
    title = row.shown.title[:1].upper() + row.shown.title[1:]
    parts = [
        _store(images),
        f"<h1>{visible(title)}</h1>",
        f'<p class="from">{visible(source)}, packing.mode {escape(row.mode)}</p>',
        _checks(checks),
        _totals(totals(row)),
        *_drawings(row, sizes),
        "<h2>Segments</h2>",
        _table(row),
        "<h2>What the model reads</h2>",
        '<p class="from"><mark>Marked text</mark> is learnt; <span class="special">special '
        "tokens</span> are spelt out.</p>",
        '<div class="texts">',
        *_texts(row, encoder, sizes),
        "</div>",
    ]
    body = "\n".join(part for part in parts if part)
    return render("row.html", title=visible(title), style=_CSS, body=body)


def _store(images: Sequence[Image]) -> str:
    symbols = "\n".join(
        f'<symbol id="image-{number}" overflow="visible"><image href="{_data_url(image)}" '
        f'width="{image.width}" height="{image.height}"/></symbol>'
        for number, image in enumerate(images)
    )
    return f'<svg class="store" aria-hidden="true">{symbols}</svg>'


def _stored(image: Image) -> Image:
    """As it is, or smaller where the page would grow too large."""
    small = image.convert("RGB")
    small.thumbnail((MAX_SIDE, MAX_SIDE), Resampling.LANCZOS)
    return small


def _data_url(image: Image) -> str:
    """Photos as JPEG; small images keep every pixel."""
    data = BytesIO()
    kind = "JPEG" if image.width * image.height > MAX_PNG_PIXELS else "PNG"
    image.save(data, kind, quality=85)
    encoded = base64.b64encode(data.getvalue()).decode("ascii")
    return f"data:image/{kind.lower()};base64,{encoded}"


def _checks(checks: Sequence[Check]) -> str:
    lines = "\n".join(
        f'<li class="{"bad" if check.fails else "good"}">'
        f'<span class="mark">{"&#10007;" if check.fails else "&#10003;"}</span>'
        f"<b>{visible(check.name)}</b><span>{visible(check.sentence)}</span></li>"
        for check in checks
    )
    return f'<ul class="checks">\n{lines}\n</ul>'


def _totals(figures: Sequence[Total]) -> str:
    items = "\n".join(
        f"<div><dt>{escape(figure.name)}</dt> <dd>{visible(figure.value)}</dd></div>"
        for figure in figures
    )
    return f"<dl>\n{items}\n</dl>"


def _drawings(row: ShownRow, sizes: Sequence[tuple[int, int]]) -> Iterator[str]:
    label = f"{len(row.shown.samples)} samples in {row.num_slots} slots, to scale"
    for name, width in LAYOUTS:
        canvas = Canvas(width)
        draw_lanes(canvas, row)
        yield svg(canvas, sizes, name=name, label=label)


def _swatch(segment: Segment) -> str:
    if segment.sample is None:
        return '<span class="swatch tail"></span>'
    return f'<span class="swatch" style="background:{segment_color(segment.number)[0]}"></span>'


def _table(row: ShownRow) -> str:
    def kind(name: str) -> str:
        return "w" if name in WORDS else "n"

    head = "".join(f'<th class="{kind(name)}">{name}</th>' for name in COLUMNS)
    lines = []
    for segment, (number, *cells) in zip(row.segments, table_rows(row), strict=True):
        rest = "".join(
            f'<td class="{kind(name)}">{visible(cell)}</td>'
            for name, cell in zip(COLUMNS[1:], cells, strict=True)
        )
        lines.append(f'<tr><td class="n">{_swatch(segment)}{number}</td>{rest}</tr>')
    body = "\n".join(lines)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'


def _texts(row: ShownRow, encoder: Encoder, sizes: Sequence[tuple[int, int]]) -> Iterator[str]:
    special = special_pattern(encoder)
    image = 0
    for segment in row.segments:
        sample = segment.sample
        if sample is None:
            continue
        about = f"{segment.length:,} tokens, {sample.num_labels:,} learnt"
        if sample.roles:
            about += f"; {', '.join(sample.roles)}"
        yield (
            f'<section style="border-color:{segment_color(segment.number)[0]}"><h3>'
            f"{segment.number}&ensp;{visible(segment.name)} <span>{visible(about)}</span></h3>"
            f'<div class="text">{_text(sample, special, image, sizes)}</div></section>'
        )
        image += len(sample.images)
    for hole in row.shown.holes:
        yield (
            f'<p class="bad">left out: {visible(hole.key)} ({visible(hole.shard)}), '
            f"{visible(hole.error_class)}: {visible(hole.reason)}</p>"
        )


def special_pattern(encoder: Encoder) -> re.Pattern[str]:
    """What finds the tokenizer's special tokens in decoded text."""
    added = encoder.tokenizer.added_tokens_decoder.values()
    names = {str(token) for token in added} | set(encoder.tokenizer.all_special_tokens)
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


def _text(
    sample: SampleView, special: re.Pattern[str], first: int, sizes: Sequence[tuple[int, int]]
) -> str:
    """The runs of a sample: learnt ones marked, images in their place.

    Args:
        sample: one of the row's.
        special: finds special tokens.
        first: number of its first image in the row.
        sizes: of the row's images.
    """
    parts, image = [], 0
    for run in sample.runs:
        if run.kind == "image":
            parts.append(f'<span class="grid">[{escape(run.text)}]</span>')
            if image < len(sample.images):
                parts.append(_inline(sizes[first + image], first + image))
            image += 1
            continue
        shown = _marked(run.text[:MAX_TEXT], special)
        cut = len(run.text) - MAX_TEXT
        shown += f" [{cut:,} characters more]" if cut > 0 else ""
        parts.append(f"<mark>{shown}</mark>" if run.kind == "learnt" else shown)
    return "".join(parts)


def _marked(text: str, special: re.Pattern[str]) -> str:
    """Escaped; special tokens in a colour of their own."""
    parts, at = [], 0
    for match in special.finditer(text):
        parts.append(visible(text[at : match.start()]))
        parts.append(f'<span class="special">{visible(match.group())}</span>')
        at = match.end()
    return "".join((*parts, visible(text[at:])))


def _inline(size: tuple[int, int], number: int) -> str:
    """An image of the store, in full size where the page has room for it."""
    width, height = size
    factor = max(1, -(-MIN_SIDE // max(size)))
    return (
        f'<svg class="image" viewBox="0 0 {width} {height}" role="img" aria-label="image {number}" '
        f'style="width:min(100%,{width * factor}px)"><use href="#image-{number}"/></svg>'
    )
