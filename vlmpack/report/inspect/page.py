"""The HTML page of a row, and its figures as text: one line per segment, and the totals.

The row is drawn three times, for wide, medium and narrow pages. Each image is in the page once.
`templates/row.html` lays the page out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from PIL.Image import Image

from vlmpack.alignment import round_up
from vlmpack.encode import Encoder
from vlmpack.errors import writing
from vlmpack.proof.measure import Check
from vlmpack.proof.rows.opening import Segment, ShownRow
from vlmpack.proof.rows.view import SampleView, TokenRun
from vlmpack.report.document import render, thumbnail
from vlmpack.report.inspect.lanes import Canvas, draw_lanes, segment_color, svg
from vlmpack.whole_file import write_atomically
from vlmpack.words import counted

COLUMNS = ("", "key", "shard", "tokens", "image", "loss", "logical", "physical", "positions")
WORDS = ("key", "shard")
"""Columns of the table of segments; numbers but for the words."""


def table_rows(row: ShownRow) -> list[tuple[str, ...]]:
    """One line a segment, as COLUMNS; ranges are first and last slot."""
    return [_cells(row, segment) for segment in row.segments]


def _cells(row: ShownRow, segment: Segment) -> tuple[str, ...]:
    sample = segment.sample
    start, end = segment.logical
    return (
        str(segment.number),
        segment.name,
        PurePosixPath(sample.shard).name if sample is not None else "",
        f"{segment.length:,}",
        f"{num_image_tokens(segment):,}",
        f"{sample.num_labels:,}" if sample is not None else "0",
        f"{start:,}-{end - 1:,}" if end > start else "none",
        f"{segment.start:,}-{segment.end - 1:,}" if segment.slots else "none",
        ", ".join(dict.fromkeys(f"{low}-{high:,}" for low, high in row.position_range(segment))),
    )


def num_image_tokens(segment: Segment) -> int:
    runs = segment.sample.runs if segment.sample is not None else ()
    return sum(run.num_tokens for run in runs if run.kind == "image")


def totals(row: ShownRow) -> dict[str, str]:
    """The figures of the whole row, by name."""
    batch, segments, context = row.batch, row.segments, row.rules.context
    gaps = sum(s.slots - s.length for s in segments if s.sample is not None)
    tail = sum(s.slots for s in segments if s.sample is None)
    what = "pairs" if batch.num_pairs else "samples"
    facts = {
        what: f"{len(batch.keys):,}",
        "tokens": _tokens(row),
        "fill": _fill(row),
        "padding": f"{gaps + tail:,} slots ({_parts(row, gaps, tail)})",
        "loss tokens": f"{batch.num_label_tokens:,}",
    }
    if batch.num_shared_tokens:
        patches = batch.num_shared_patches
        facts["shared"] = f"{batch.num_shared_tokens:,} tokens, {patches:,} patches not repeated"
    if (media := batch.media) is not None:
        patches = sum(t * h * w for t, h, w in media.grid_thw)
        tokens = sum(media.num_tokens)
        facts["images"] = f"{media.num_images:,}: {tokens:,} tokens, {patches:,} patches"
    if (flops := row.flops()) is not None:
        share = f", {flops[1] / sum(flops):.0%} of it vision" if flops[1] else ""
        facts["cost"] = f"{_flops(sum(flops))} a training step{share}"
    if context > 1:
        facts["CP"] = f"{context} ranks, {batch.num_slots // context:,} slots each"
    if row.shown.holes:
        facts["left out"] = f"{len(row.shown.holes)} bad samples"
    return facts


def _tokens(row: ShownRow) -> str:
    """Tokens and slots as they are computed: what samples share, once."""
    batch = row.batch
    text = f"{batch.num_tokens - batch.num_shared_tokens:,} in {batch.num_slots:,} slots"
    if not batch.num_shared_tokens:
        return text
    slots = round_up(row.ends[-1], row.rules.multiples.row)
    return f"{text} ({batch.num_tokens:,} in {slots:,} with nothing shared)"


def _flops(count: float) -> str:
    for size, name in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if count >= size:
            return f"{count / size:.3g} {name}FLOP"
    return f"{count / 1e6:.3g} MFLOP"


def _fill(row: ShownRow) -> str:
    batch = row.batch
    tokens, budget = batch.num_tokens - batch.num_shared_tokens, row.rules.budget
    fill = f"{tokens / max(1, batch.num_slots):.1%}"
    if budget is None:
        return fill
    return f"{fill}; {tokens / budget.max_tokens:.1%} of the budget {budget.max_tokens:,}"


def _parts(row: ShownRow, gaps: int, tail: int) -> str:
    if row.is_padded:
        return f"rows of {row.num_slots // row.shown.num_rows:,}"
    return f"{gaps:,} in alignment gaps, {tail:,} in the tail"


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
        pieces: of its text: plain text and special tokens in turn.
        cut: characters left out after them.
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
        path: its folder is made if missing.

    Raises:
        VlmpackError: the folder cannot be written.
    """
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, render_page(row, checks, encoder, source))


def render_page(row: ShownRow, checks: Sequence[Check], encoder: Encoder, source: str) -> str:
    """The page as HTML."""
    pictures = [image for sample in row.shown.samples for image in sample.images]
    images = [_stored(number, image) for number, image in enumerate(pictures)]
    special, images_left = special_pattern(encoder), iter(images)
    texts = [
        tuple(_passages(segment.sample, special, images_left)) if segment.sample is not None else ()
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
    images_left = len(sample.images)
    for run in sample.runs:
        if run.kind == "image":
            yield Passage(run, (), 0, next(images) if images_left > 0 else None)
            images_left -= 1
            continue
        pieces = special.split(run.text[:MAX_TEXT])
        yield Passage(run, tuple(pieces), max(0, len(run.text) - MAX_TEXT), None)
    for _ in range(images_left):
        next(images)  # none of its tokens: the next sample's images are not its
