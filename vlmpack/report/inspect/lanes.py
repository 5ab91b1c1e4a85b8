"""A row's tokens to scale, in lines of equal length, each with the same lanes:

    images     thumbnails, over the image tokens that stand for them
    samples    a colour each, with number, key and length; gaps and the tail hatched
    tokens     text pale, image tokens dark
    loss       the slots that learn to predict their next token
    position   the axes' positions, which fall back to 0 where a sample begins
    CP rank    who holds which slots, the darker the higher the rank

Lines across all lanes: solid where a segment ends in memory, dashed where its sample ends before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from vlmpack.report.inspect.canvas import (
    FAINT,
    INK,
    MUTED,
    Canvas,
    Path,
    Rect,
    Text,
    fitted,
    text_width,
)
from vlmpack.report.inspect.row import Row, Segment
from vlmpack.report.inspect.thumbs import place_thumbs

COLORS = (
    ("#0072b2", "#ffffff"),
    ("#7cc6ee", INK),
    ("#009e73", "#ffffff"),
    ("#d79abf", INK),
    ("#e9d54d", INK),
)
"""(fill, ink) of neighbouring samples, from Okabe and Ito's colour-blind-safe set."""
PAD, PAD_LINES = "#f3f4f6", "#8b96a3"
TEXT_TOKENS, IMAGE_TOKENS = "#d9dee4", "#5b4a8a"
LOSS, NO_LOSS = "#d55e00", "#f3f4f6"
AXES = ("#1f2933", "#0072b2", "#d55e00", "#009e73")
AXIS_NAMES = ("temporal", "height", "width")
RANKS = ("#f0e68c", "#7ad151", "#22a884", "#2a788e", "#414487", "#2c0d44")
"""Viridis from light to dark: zigzag shows as light to dark and back to light."""

GUTTER = 58.0
SMALL = 10.0
MIN_SEGMENT = 88.0
"""Pixels for a sample of mean length: enough for its number and length."""
MIN_GAP = 2.0
"""Pixels of a gap at least, so that one token shows in a long row."""
MAX_LINES = 48
SAMPLE_HEIGHT, STRIP_HEIGHT, POSITION_HEIGHT, RANK_HEIGHT = 22.0, 9.0, 40.0, 13.0
GAP = 4.0


@dataclass(frozen=True, slots=True)
class Line:
    """Slots `begin` to `end` of the row, drawn from `left` at `scale` pixels a slot."""

    begin: int
    end: int
    left: float
    scale: float

    def x(self, slot: float) -> float:
        """Where a slot begins."""
        return self.left + (slot - self.begin) * self.scale

    def cut(self, begin: int, end: int) -> tuple[int, int] | None:
        """The part of a range that is in this line."""
        first, last = max(begin, self.begin), min(end, self.end)
        return (first, last) if first < last else None


def segment_color(number: int) -> tuple[str, str]:
    """(fill, ink) of a segment."""
    return COLORS[number % len(COLORS)]


def rank_color(rank: int, size: int) -> tuple[str, str]:
    """(fill, ink) of a context-parallel rank."""
    place = round(rank * (len(RANKS) - 1) / max(1, size - 1))
    if size <= len(RANKS):
        return RANKS[place], INK if place < 3 else "#ffffff"
    low, share = divmod(rank * (len(RANKS) - 1) / (size - 1), 1)
    ends = (RANKS[int(low)], RANKS[min(int(low) + 1, len(RANKS) - 1)])
    parts = [
        round(int(ends[0][k : k + 2], 16) * (1 - share) + int(ends[1][k : k + 2], 16) * share)
        for k in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02x}" for part in parts), INK if low < 3 else "#ffffff"


def row_lines(row: Row, width: float) -> list[Line]:
    """The row cut into lines; rows of mode `none` get one each."""
    room = width - GUTTER - 2
    slots = max(1, row.num_slots)
    if row.is_padded:
        count, each = min(row.num_rows, MAX_LINES), slots // row.num_rows
    else:
        wanted = max(slots / room, len(row.segments) * MIN_SEGMENT / room)
        count = min(MAX_LINES, max(1, -int(-wanted // 1)))
        each = -(-slots // count)
        count = -(-slots // each)
    scale = room / each
    return [Line(k * each, min((k + 1) * each, slots), GUTTER, scale) for k in range(count)]


def draw_lanes(canvas: Canvas, row: Row) -> None:
    """Draw the row below what is on the canvas."""
    lines = row_lines(row, canvas.width)
    ranks = row.ranks()
    for line in lines:
        canvas.height += 6
        top = place_thumbs(canvas, row, line)
        if top is not None:
            _name(canvas, "images", top + 14)
        first = canvas.height
        _axis(canvas, line)
        _samples(canvas, row, line)
        _tokens(canvas, row, line)
        _loss(canvas, row, line)
        _positions(canvas, row, line)
        if ranks is not None:
            _ranks(canvas, ranks, row.rules.context, line)
        _boundaries(canvas, row, line, first + 14)
        canvas.height += 10
    drawn = lines[-1].end
    if drawn < row.num_slots:
        note = f"rows {len(lines)} to {row.num_rows - 1} are not drawn"
        canvas.add(Text(x=GUTTER, y=canvas.height + 12, text=note, color=MUTED))
        canvas.height += 20
    draw_legend(canvas, row)


def _name(canvas: Canvas, name: str, y: float) -> None:
    canvas.add(Text(x=GUTTER - 6, y=y, text=name, size=SMALL, color=MUTED, anchor="end"))


def _axis(canvas: Canvas, line: Line) -> None:
    """Slot numbers at round steps."""
    step = next(s * 10**e for e in range(9) for s in (1, 2, 5) if s * 10**e * line.scale >= 52)
    y = canvas.height + 10
    _name(canvas, "slot", y)
    for slot in range(-(-line.begin // step) * step, line.end, step):
        if line.x(slot) + text_width(f"{slot:,}", 9) > canvas.width:
            break
        canvas.add(Text(x=line.x(slot), y=y, text=f"{slot:,}", size=9, color=MUTED))
        canvas.add(Path(points=((line.x(slot), y + 1), (line.x(slot), y + 4)), color=MUTED))
    canvas.height += 14


def _samples(canvas: Canvas, row: Row, line: Line) -> None:
    y = canvas.height
    _name(canvas, "samples", y + 15)
    gaps: list[Rect] = []
    for segment in row.segments:
        body = line.cut(segment.start, segment.start + segment.length)
        if body:
            _sample(canvas, segment, line, body)
        gap = line.cut(segment.start + segment.length, segment.end)
        if gap:
            wide = max(MIN_GAP, (gap[1] - gap[0]) * line.scale)
            what = "tail segment" if segment.sample is None else f"gap behind {segment.name}"
            right = line.x(gap[1])
            gaps.append(
                Rect(
                    x=right - wide,
                    y=y,
                    width=wide,
                    height=SAMPLE_HEIGHT,
                    fill=PAD,
                    hatch=PAD_LINES,
                    tip=f"{what}: {segment.slots - segment.length} slots of padding",
                )
            )
            label = f"tail {segment.slots}"
            if segment.sample is None and text_width(label, SMALL) + 6 <= wide:
                gaps.append(_backing(right - wide / 2, y, label))
                canvas.shapes.extend(())
    canvas.add(*gaps)
    for segment in row.segments:
        _tail_label(canvas, segment, line, y)
    canvas.height += SAMPLE_HEIGHT + GAP


def _backing(x: float, y: float, label: str) -> Rect:
    wide = text_width(label, SMALL) + 4
    return Rect(x=x - wide / 2, y=y + 4, width=wide, height=SAMPLE_HEIGHT - 8, fill=PAD)


def _tail_label(canvas: Canvas, segment: Segment, line: Line, y: float) -> None:
    part = line.cut(segment.start, segment.end)
    label = f"tail {segment.slots}"
    if segment.sample is not None or not part:
        return
    if text_width(label, SMALL) + 6 <= (part[1] - part[0]) * line.scale:
        x = line.x((part[0] + part[1]) / 2)
        canvas.add(Text(x=x, y=y + 15, text=label, size=SMALL, anchor="middle"))


def _sample(canvas: Canvas, segment: Segment, line: Line, body: tuple[int, int]) -> None:
    fill, ink = segment_color(segment.number)
    wide = (body[1] - body[0]) * line.scale
    canvas.add(
        Rect(
            x=line.x(body[0]),
            y=canvas.height,
            width=wide,
            height=SAMPLE_HEIGHT,
            fill=fill,
            tip=f"{segment.number}: {segment.name}, {segment.length:,} tokens",
        )
    )
    room = wide - 8
    choices = (
        f"{segment.number}  {segment.name}  {segment.length:,}",
        f"{segment.number}: {segment.length:,}",
        f"{segment.number}",
    )
    for choice in choices:
        if text_width(choice, 11) <= room:
            at = line.x(body[0]) + 4
            canvas.add(Text(x=at, y=canvas.height + 15, text=choice, color=ink))
            return


def _tokens(canvas: Canvas, row: Row, line: Line) -> None:
    y = canvas.height
    _name(canvas, "tokens", y + 8)
    for segment in row.segments:
        slot = segment.start
        for run in segment.sample.runs if segment.sample is not None else ():
            color = IMAGE_TOKENS if run.kind == "image" else TEXT_TOKENS
            _strip(canvas, line, (slot, slot + run.num_tokens), color)
            slot += run.num_tokens
        _gap(canvas, line, segment, y)
    canvas.height += STRIP_HEIGHT + GAP


def _loss(canvas: Canvas, row: Row, line: Line) -> None:
    y = canvas.height
    _name(canvas, "loss", y + 8)
    for segment in row.segments:
        _strip(canvas, line, (segment.start, segment.start + segment.length), NO_LOSS)
        _gap(canvas, line, segment, y)
    mask = row.batch.loss_mask.flatten().tolist()
    for begin, end, learns in runs(mask[line.begin : line.end], line.begin):
        if learns:
            _strip(canvas, line, (begin, end), LOSS)
    canvas.height += STRIP_HEIGHT + GAP


def _strip(canvas: Canvas, line: Line, slots: tuple[int, int], fill: str) -> None:
    part = line.cut(*slots)
    if part:
        wide = (part[1] - part[0]) * line.scale
        x, y = line.x(part[0]), canvas.height
        canvas.add(Rect(x=x, y=y, width=wide, height=STRIP_HEIGHT, fill=fill))


def _gap(canvas: Canvas, line: Line, segment: Segment, y: float) -> None:
    gap = line.cut(segment.start + segment.length, segment.end)
    if gap:
        wide = max(MIN_GAP, (gap[1] - gap[0]) * line.scale)
        x = line.x(gap[1]) - wide
        canvas.add(Rect(x=x, y=y, width=wide, height=STRIP_HEIGHT, fill=PAD, hatch=PAD_LINES))


def _positions(canvas: Canvas, row: Row, line: Line) -> None:
    """One line an axis, broken where a sample ends."""
    top, bottom = canvas.height + 2, canvas.height + POSITION_HEIGHT
    most = max(1, int(row.batch.position_ids.max()))
    _name(canvas, f"{most:,}", top + 8)
    _name(canvas, "position", (top + bottom) / 2 + 4)
    _name(canvas, "0", bottom)
    base = ((line.left, bottom), (line.x(line.end), bottom))
    canvas.add(Path(points=base, color=FAINT))
    axes = row.batch.position_ids.flatten(1).tolist()
    for axis, positions in reversed(list(enumerate(axes))):
        for segment in row.segments:
            part = line.cut(segment.start, segment.start + segment.length)
            if part:
                points = tuple(
                    (line.x(slot), bottom - (bottom - top) * position / most)
                    for slot, position in _thinned(positions, part, line.scale)
                )
                canvas.add(Path(points=points, color=AXES[axis % len(AXES)], width=1.3))
    canvas.height += POSITION_HEIGHT + GAP


def _thinned(
    positions: Sequence[int], part: tuple[int, int], scale: float
) -> Iterator[tuple[float, int]]:
    """(slot, position) of a few slots to a pixel: the least and the largest of each group."""
    step = max(1, int(1 / scale))
    for at in range(part[0], part[1], step):
        group = positions[at : min(at + step, part[1])]
        yield at, group[0]
        if step > 2:
            yield at + step / 2, max(group)
    yield part[1], positions[part[1] - 1]


def _ranks(canvas: Canvas, ranks: Sequence[int], size: int, line: Line) -> None:
    _name(canvas, "CP rank", canvas.height + 10)
    for begin, end, rank in runs(ranks[line.begin : line.end], line.begin):
        x, wide = line.x(begin), (end - begin) * line.scale
        fill, ink = rank_color(rank, size) if rank >= 0 else ("#ffffff", INK)
        canvas.add(
            Rect(
                x=x,
                y=canvas.height,
                width=wide,
                height=RANK_HEIGHT,
                fill=fill,
                tip=f"rank {rank}: slots {begin} to {end - 1}",
            )
        )
        if text_width(str(rank), 9) + 3 <= wide:
            y = canvas.height + RANK_HEIGHT - 3
            canvas.add(
                Text(x=x + wide / 2, y=y, text=str(rank), size=9, color=ink, anchor="middle")
            )
    canvas.height += RANK_HEIGHT + GAP


def _boundaries(canvas: Canvas, row: Row, line: Line, top: float) -> None:
    bottom = canvas.height - GAP + 2
    for segment in row.segments:
        for place, dashed in ((segment.start + segment.length, True), (segment.end, False)):
            if dashed and (segment.slots == segment.length or not segment.length):
                continue
            if line.begin < place <= line.end:
                x = line.x(place)
                if dashed:
                    x = min(x, line.x(segment.end) - MIN_GAP)
                points = ((x, top - 2), (x, bottom))
                canvas.add(
                    Path(points=points, color=INK, width=0.8 if dashed else 1.2, dashed=dashed)
                )


def runs(values: Iterable[int], start: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, value) of neighbours that are equal."""
    for value, members in groupby(values):
        length = sum(1 for _ in members)
        yield start, start + length, value
        start += length


def draw_legend(canvas: Canvas, row: Row) -> None:
    """What the colours mean, in as many lines as it takes."""
    has_images = row.batch.media is not None
    axes = int(row.batch.position_ids.shape[0])
    names = AXIS_NAMES if axes == len(AXIS_NAMES) else tuple(f"axis {k}" for k in range(axes))
    entries: list[tuple[str, str | None, str]] = [
        (segment_color(0)[0], None, "a sample: number, key, tokens"),
        (PAD, PAD_LINES, "padding"),
        (TEXT_TOKENS, None, "text tokens"),
        *([(IMAGE_TOKENS, None, "image tokens")] if has_images else []),
        (LOSS, None, "slots with loss: their next token is learnt"),
        *((AXES[k % len(AXES)], "line", f"{name} position") for k, name in enumerate(names)),
        (INK, "line", "segment ends (dashed: its sample does)"),
    ]
    x, y = GUTTER, canvas.height + 14
    for color, kind, text in entries:
        wide = 18 + text_width(text, SMALL) + 16
        if x + wide > canvas.width and x > GUTTER:
            x, y = GUTTER, y + 16
        if kind == "line":
            canvas.add(Path(points=((x, y - 4), (x + 12, y - 4)), color=color, width=2))
        else:
            canvas.add(Rect(x=x, y=y - 9, width=12, height=10, fill=color, hatch=kind))
        canvas.add(Text(x=x + 18, y=y, text=fitted(text, SMALL, canvas.width - x - 18), size=SMALL))
        x += wide
    canvas.height = y + 10
