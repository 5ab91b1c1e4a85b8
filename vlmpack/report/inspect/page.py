"""The HTML page of a row: one file that needs nothing beside it; `templates/row.html` lays it out.

The row is drawn three times, for wide, medium and narrow pages; each image is in the page once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL.Image import Image

from vlmpack.encode import Encoder
from vlmpack.errors import writing
from vlmpack.proof.measure import Check
from vlmpack.proof.rows.opening import ShownRow
from vlmpack.proof.rows.view import SampleView, TokenRun
from vlmpack.report.document import render
from vlmpack.report.inspect.canvas import Canvas, svg
from vlmpack.report.inspect.lanes import draw_lanes
from vlmpack.report.inspect.legend import segment_color
from vlmpack.report.inspect.table import COLUMNS, WORDS, table_rows, totals
from vlmpack.report.thumbnail import thumbnail
from vlmpack.whole_file import write_atomically
from vlmpack.words import counted

LAYOUTS = (("large", 1180.0), ("medium", 700.0), ("small", 368.0))
"""(class, width in pixels at which it is drawn); the style sheet of `templates/row.html` chooses
one that it need not shrink, so that its text keeps its size."""

MIN_SIDE = 96
"""Smaller images are enlarged by a whole factor."""

MAX_TEXT = 40_000
"""Characters of one run of text that are shown."""


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image as the page holds it.

    Args:
        number: in the row.
        url: its data.
        size: (width, height) in pixels.
        shown_width: in pixels, among the texts of a page that has room for it.
    """

    number: int
    url: str
    size: tuple[int, int]
    shown_width: int


@dataclass(frozen=True, slots=True)
class Passage:
    """A run of tokens as the page shows it.

    Args:
        run: its tokens.
        pieces: of its text: what a reader wrote, then a special token, and so on in turn.
        cut: characters that are left out behind them.
        image: the one that begins here.
    """

    run: TokenRun
    pieces: tuple[str, ...]
    cut: int
    image: StoredImage | None


def write_row(
    row: ShownRow, checks: Sequence[Check], encoder: Encoder, path: Path, *, source: str
) -> None:
    """Write the page; it appears whole or not at all.

    Args:
        row: what to show.
        checks: of the row.
        encoder: that made it.
        path: its folder is made if missing.
        source: the recipe, for the head.

    Raises:
        VlmpackError: the folder cannot be written.
    """
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, render_page(row, checks, encoder, source))


def render_page(row: ShownRow, checks: Sequence[Check], encoder: Encoder, source: str) -> str:
    """The page as HTML.

    Args:
        row: what to show.
        checks: of the row.
        encoder: that made it: its special tokens are marked in the texts.
        source: the recipe, for the head.
    """
    pictures = [image for sample in row.shown.samples for image in sample.images]
    images = [_stored(number, image) for number, image in enumerate(pictures)]
    special, left = special_pattern(encoder), iter(images)
    texts = [
        tuple(_passages(segment.sample, special, left)) if segment.sample is not None else ()
        for segment in row.segments
    ]
    return render(
        "row.html",
        title=row.shown.title[:1].upper() + row.shown.title[1:],
        source=source,
        row=row,
        checks=checks,
        totals=totals(row),
        images=images,
        drawings=list(_drawings(row, [image.size for image in images])),
        columns=[(name, name in WORDS) for name in COLUMNS],
        segments=list(zip(row.segments, table_rows(row), texts, strict=True)),
        color=lambda number: segment_color(number)[0],
    )


def _stored(number: int, image: Image) -> StoredImage:
    url, size = thumbnail(image)
    factor = max(1, -(-MIN_SIDE // max(size)))
    return StoredImage(number, url, size, size[0] * factor)


def _drawings(row: ShownRow, sizes: Sequence[tuple[int, int]]) -> Iterator[str]:
    what = "pair" if row.batch.num_pairs else "sample"
    label = f"{counted(len(row.batch.keys), what)} in {row.num_slots} slots, to scale"
    for name, width in LAYOUTS:
        canvas = Canvas(width)
        draw_lanes(canvas, row)
        yield svg(canvas, sizes, name=name, label=label)


def special_pattern(encoder: Encoder) -> re.Pattern[str]:
    """What splits decoded text at the tokenizer's special tokens."""
    added = encoder.tokenizer.added_tokens_decoder.values()
    names = {str(token) for token in added} | set(encoder.tokenizer.all_special_tokens)
    return re.compile(f"({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})")


def _passages(
    sample: SampleView, special: re.Pattern[str], images: Iterator[StoredImage]
) -> Iterator[Passage]:
    """The runs of a sample, each image where its tokens begin."""
    left = len(sample.images)
    for run in sample.runs:
        if run.kind == "image":
            yield Passage(run, (), 0, next(images) if left > 0 else None)
            left -= 1
            continue
        pieces = special.split(run.text[:MAX_TEXT])
        yield Passage(run, tuple(pieces), max(0, len(run.text) - MAX_TEXT), None)
    for _ in range(left):
        next(images)  # none of its tokens: the next sample's images are not its
