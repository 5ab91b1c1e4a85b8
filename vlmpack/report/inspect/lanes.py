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

from collections.abc import Iterator, Sequence

from vlmpack.proof.rows.opening import Segment, ShownRow
from vlmpack.report.inspect.canvas import FAINT, INK, MUTED, Canvas, Path, Rect, Text, text_width
from vlmpack.report.inspect.legend import (
    AXES,
    IMAGE_TOKENS,
    LOSS,
    NO_LOSS,
    PAD,
    PAD_LINES,
    SMALL,
    TEXT_TOKENS,
    draw_legend,
    rank_color,
    segment_color,
)
from vlmpack.report.inspect.lines import GUTTER, Line, row_lines, runs
from vlmpack.report.inspect.thumbs import place_thumbs

MIN_GAP = 2.0
"""Pixels of a gap at least, so that one token shows in a long row."""
SAMPLE_HEIGHT, STRIP_HEIGHT, POSITION_HEIGHT, RANK_HEIGHT = 22.0, 9.0, 40.0, 13.0
GAP = 4.0


def draw_lanes(canvas: Canvas, row: ShownRow) -> None:
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
            _ranks(canvas, row, ranks, line)
        _boundaries(canvas, row, line, first + 14)
        canvas.height += 10
    drawn = lines[-1].end
    if drawn < row.num_slots:
        note = f"rows {len(lines)} to {row.shown.num_rows - 1} are not drawn"
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
        if line.x(slot) + text_width(f"{slot:,}", SMALL) > canvas.width:
            break
        canvas.add(Text(x=line.x(slot), y=y, text=f"{slot:,}", size=SMALL, color=MUTED))
        canvas.add(Path(points=((line.x(slot), y + 1), (line.x(slot), y + 4)), color=MUTED))
    canvas.height += 14


def _samples(canvas: Canvas, row: ShownRow, line: Line) -> None:
    _name(canvas, "samples", canvas.height + 15)
    for segment in row.segments:
        body = line.cut(segment.start, segment.start + segment.length)
        if body:
            _sample(canvas, segment, line, body)
    for segment in row.segments:
        _gap(canvas, line, segment, SAMPLE_HEIGHT)
    canvas.height += SAMPLE_HEIGHT + GAP


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
        f"{segment.number} \u00b7 {segment.name} \u00b7 {segment.length:,}",
        f"{segment.number} \u00b7 {segment.length:,}",
        f"{segment.number}",
    )
    for choice in choices:
        if text_width(choice, 11) <= room:
            at = line.x(body[0]) + 4
            canvas.add(Text(x=at, y=canvas.height + 15, text=choice, color=ink))
            return


def _tokens(canvas: Canvas, row: ShownRow, line: Line) -> None:
    _name(canvas, "tokens", canvas.height + 8)
    for segment in row.segments:
        slot = segment.start
        for run in segment.sample.runs if segment.sample is not None else ():
            color = IMAGE_TOKENS if run.kind == "image" else TEXT_TOKENS
            _strip(canvas, line, (slot, slot + run.num_tokens), color)
            slot += run.num_tokens
        _gap(canvas, line, segment, STRIP_HEIGHT)
    canvas.height += STRIP_HEIGHT + GAP


def _loss(canvas: Canvas, row: ShownRow, line: Line) -> None:
    _name(canvas, "loss", canvas.height + 8)
    for segment in row.segments:
        _strip(canvas, line, (segment.start, segment.start + segment.length), NO_LOSS)
        _gap(canvas, line, segment, STRIP_HEIGHT)
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


def _gap(canvas: Canvas, line: Line, segment: Segment, height: float) -> None:
    """The slots of a segment behind its sample, hatched; a tail says so where there is room."""
    gap = line.cut(segment.start + segment.length, segment.end)
    if not gap:
        return
    wide = max(MIN_GAP, (gap[1] - gap[0]) * line.scale)
    x, y = line.x(gap[1]) - wide, canvas.height
    count = segment.slots - segment.length
    what = "tail segment" if segment.sample is None else f"gap behind {segment.name}"
    tip = f"{what}: {count} slots of padding"
    canvas.add(
        Rect(x=x, y=y, width=wide, height=height, fill=PAD, hatch=PAD_LINES, tip=tip),
    )
    label = f"tail {count:,}" if segment.sample is None else f"{count:,}"
    room = text_width(label, SMALL) + 4
    if height >= SAMPLE_HEIGHT and room + 8 <= wide:
        middle = x + wide / 2
        canvas.add(
            Rect(x=middle - room / 2, y=y + 4, width=room, height=height - 8, fill=PAD),
            Text(x=middle, y=y + 15, text=label, size=SMALL, anchor="middle"),
        )


def _positions(canvas: Canvas, row: ShownRow, line: Line) -> None:
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


def _ranks(canvas: Canvas, row: ShownRow, ranks: Sequence[int], line: Line) -> None:
    _name(canvas, "CP rank", canvas.height + 10)
    for segment in row.segments:
        part = line.cut(segment.start, segment.end)
        for piece in runs(ranks[part[0] : part[1]], part[0]) if part else ():
            _rank(canvas, line, piece, row.rules.context)
    canvas.height += RANK_HEIGHT + GAP


def _rank(canvas: Canvas, line: Line, piece: tuple[int, int, int], size: int) -> None:
    begin, end, rank = piece
    x, wide = line.x(begin), (end - begin) * line.scale
    fill, ink = rank_color(rank, size) if rank >= 0 else ("#ffffff", INK)
    tip = f"rank {rank}: slots {begin} to {end - 1}"
    y = canvas.height
    canvas.add(Rect(x=x, y=y, width=wide, height=RANK_HEIGHT, fill=fill, tip=tip))
    if text_width(str(rank), SMALL) + 6 <= wide:
        middle, base = x + wide / 2, y + RANK_HEIGHT - 3
        canvas.add(Text(x=middle, y=base, text=str(rank), size=SMALL, color=ink, anchor="middle"))


def _boundaries(canvas: Canvas, row: ShownRow, line: Line, top: float) -> None:
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
