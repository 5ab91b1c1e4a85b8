"""A row's tokens to scale, in lines of equal length, each with the same lanes:

    images     thumbnails, over the image tokens that stand for them
    samples    a colour each, with number, key and length; gaps and the tail hatched
    tokens     text pale, image tokens dark
    loss       the slots that learn to predict their next token
    position   the axes' positions, which fall back to 0 where a sample begins
    CP rank    who holds which slots, the darker the higher the rank

Across all lanes, a solid line ends a segment in memory, and a dashed one ends its sample. The
colours are safe for colour-blind readers, and a legend explains them.

A drawing is a list of shapes, in pixels from the left and top, written as SVG. Images are drawn by
`<use>`, so that each is in the page once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from itertools import groupby, pairwise
from typing import Literal

from PIL import ImageFont

from vlmpack.proof.rows.opening import Segment, ShownRow
from vlmpack.report.document import written_out

INK, MUTED, FAINT = "var(--ink)", "var(--muted)", "var(--faint)"
"""By name, as all that lies on the page: `style.PALETTE` has a light and a dark one of each."""
DARK_INK = "#1f2933"
"""On a fill that is light on any page."""

WIDER = 1.15
"""Browsers' fonts may be wider than the one that text is measured with."""

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rect:
    """A filled box; `hatch` draws diagonal lines of that colour over it, `tip` shows on hover."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    hatch: str | None = None
    tip: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Lines through some points."""

    points: tuple[tuple[float, float], ...]
    color: str
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One line; `y` is its baseline."""

    x: float
    y: float
    text: str
    size: float = 11.0
    color: str = INK
    anchor: Anchor = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thumb:
    """An image of the row, by its number."""

    x: float
    y: float
    width: float
    height: float
    image: int


Shape = Rect | Path | Text | Thumb


@dataclass(slots=True)
class Canvas:
    """Shapes in the order they are drawn."""

    width: float
    height: float = 0.0
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        self.shapes += shapes


def text_width(text: str, size: float) -> float:
    """About how wide a line is, rather too wide than too narrow."""
    return WIDER * font(size).getlength(text)


def fitted(text: str, size: float, room: float) -> str:
    """As much of a line as fits, an ellipsis where some was cut; "" where nothing useful does."""
    if text_width(text, size) <= room:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if text_width(text[:middle] + "...", size) <= room:
            low = middle
        else:
            high = middle - 1
    return text[:low] + "..." if low >= 3 else ""


@lru_cache(maxsize=32)
def font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def svg(canvas: Canvas, sizes: Sequence[tuple[int, int]], *, name: str, label: str) -> str:
    """The drawing as an `<svg>` element that scales with the page.

    Args:
        sizes: (width, height) of the images; the page defines each as a symbol `image-N`.
        label: its description for screen readers.
    """
    colours = sorted({s.hatch for s in canvas.shapes if isinstance(s, Rect) and s.hatch})
    patterns = "".join(
        f'<pattern id="{name}-{place}" width="4" height="4" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="1.4" height="4" fill="{colour}"/></pattern>'
        for place, colour in enumerate(colours)
    )
    hatches = {colour: f"{name}-{place}" for place, colour in enumerate(colours)}
    body = "\n".join(_shape(shape, sizes, hatches) for shape in canvas.shapes)
    return (
        f'<svg class="{name}" viewBox="0 0 {canvas.width:g} {canvas.height:g}" role="img" '
        f'aria-label="{escape(label)}"><defs>{patterns}</defs>\n{body}\n</svg>'
    )


def _shape(shape: Shape, sizes: Sequence[tuple[int, int]], hatches: dict[str, str]) -> str:
    if isinstance(shape, Rect):
        box = (
            f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" '
            f'height="{shape.height:.2f}"'
        )
        tip = f"<title>{escape(written_out(shape.tip))}</title>" if shape.tip else ""
        plain = f'<rect {box} fill="{shape.fill}">{tip}</rect>'
        if shape.hatch is None:
            return plain
        return f'{plain}<rect {box} fill="url(#{hatches[shape.hatch]})">{tip}</rect>'
    if isinstance(shape, Path):
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in shape.points)
        dash = ' stroke-dasharray="3 2"' if shape.dashed else ""
        return (
            f'<polyline points="{points}" fill="none" stroke="{shape.color}" '
            f'stroke-width="{shape.width:g}"{dash}/>'
        )
    if isinstance(shape, Text):
        return (
            f'<text x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size:g}" '
            f'fill="{shape.color}" text-anchor="{shape.anchor}">'
            f"{escape(written_out(shape.text))}</text>"
        )
    scale = shape.width / sizes[shape.image][0]
    return (
        f'<use href="#image-{shape.image}" '
        f'transform="translate({shape.x:.2f} {shape.y:.2f}) scale({scale:.4f})"/>'
    )


GUTTER = 58.0
"""Pixels for the lanes' names, left of the slots."""
MIN_SEGMENT = 88.0
"""Pixels for a sample of mean length: enough for its number and length."""
MAX_LINES = 48


@dataclass(frozen=True, slots=True)
class Line:
    """Slots `start` to `end` of the row, drawn from `left` at `scale` pixels a slot."""

    start: int
    end: int
    left: float
    scale: float

    def x(self, slot: float) -> float:
        return self.left + (slot - self.start) * self.scale

    def cut(self, start: int, end: int) -> tuple[int, int] | None:
        first, last = max(start, self.start), min(end, self.end)
        return (first, last) if first < last else None


def row_lines(row: ShownRow, width: float) -> list[Line]:
    """The row cut into lines; rows of mode `none` get one each."""
    room = width - GUTTER - 2
    slots = max(1, row.num_slots)
    if row.is_padded:
        count, each = min(row.shown.num_rows, MAX_LINES), slots // row.shown.num_rows
    else:
        number = max(slots / room, len(row.segments) * MIN_SEGMENT / room)
        count = min(MAX_LINES, max(1, -int(-number // 1)))
        each = -(-slots // count)
        count = -(-slots // each)
    scale = room / each
    return [Line(k * each, min((k + 1) * each, slots), GUTTER, scale) for k in range(count)]


def runs(values: Iterable[int], start: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, value) of neighbours that are equal."""
    for value, members in groupby(values):
        length = sum(1 for _ in members)
        yield start, start + length, value
        start += length


SMALL = 10.0

COLORS = (
    ("#0072b2", "#ffffff"),
    ("#7cc6ee", DARK_INK),
    ("#00805d", "#ffffff"),
    ("#d79abf", DARK_INK),
    ("#e9d54d", DARK_INK),
)
"""(fill, ink) of neighbouring samples, from Okabe and Ito's colour-blind-safe set."""
PAD, PAD_LINES = "var(--pad)", "var(--pad-lines)"
TEXT_TOKENS, IMAGE_TOKENS = "var(--text-tokens)", "var(--violet)"
LOSS, NO_LOSS = "var(--loss)", "var(--pad)"
AXES = (INK, "var(--blue)", LOSS, "var(--green)")
AXIS_NAMES = ("temporal position", "height position", "width position")
RANKS = ("#f0e68c", "#7ad151", "#22a884", "#2a788e", "#414487", "#2c0d44")
"""Viridis from light to dark: zigzag shows as light to dark and back to light."""


def segment_color(number: int) -> tuple[str, str]:
    return COLORS[number % len(COLORS)]


def rank_color(rank: int, size: int) -> tuple[str, str]:
    """The fill of a rank's lane, and the colour of text on it."""
    place = rank * (len(RANKS) - 1) / max(1, size - 1)
    low, share = divmod(place, 1)
    ends = (RANKS[int(low)], RANKS[min(int(low) + 1, len(RANKS) - 1)])
    parts = [
        round(int(ends[0][k : k + 2], 16) * (1 - share) + int(ends[1][k : k + 2], 16) * share)
        for k in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02x}" for part in parts), DARK_INK if place < 3 else "#ffffff"


def draw_legend(canvas: Canvas, row: ShownRow) -> None:
    """What the colours mean, in as many lines as it takes."""
    has_images = row.batch.media is not None
    axes = int(row.batch.position_ids.shape[0])
    names: tuple[str, ...] = ("position",) if axes == 1 else AXIS_NAMES[:axes]
    size = row.rules.context
    ranks = (0, size - 1) if size > 1 else ()
    entries: list[tuple[str, str | None, str]] = [
        (segment_color(0)[0], None, "a sample, or what several share: number, key, tokens"),
        (PAD, PAD_LINES, "padding"),
        (TEXT_TOKENS, None, "text tokens"),
        *([(IMAGE_TOKENS, None, "image tokens")] if has_images else []),
        (LOSS, None, "slots with loss: their next token is learnt"),
        *((AXES[k % len(AXES)], "line", name) for k, name in enumerate(names)),
        (INK, "line", "segment ends (dashed: its sample does)"),
        *((rank_color(rank, size)[0], None, f"CP rank {rank}") for rank in ranks),
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


HEIGHT = 40.0
MIN_SHRINK = 0.25
MIN_WIDTH, MAX_WIDTH = 44.0, 130.0
"""Bounds on an image at full height, which ends where the next one begins if these let it."""
SPACE = 2.0
LEAD = 7.0
"""Pixels between the images and the tokens, where a line leads from one to the other."""


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image of the row.

    Args:
        begin, end: slots of its tokens.
        size: (width, height) in pixels.
    """

    image: int
    start: int
    end: int
    size: tuple[int, int]


def image_spans(row: ShownRow) -> Iterator[ImageSpan]:
    image = 0
    for sample in row.shown.samples:
        slot, own = sample.start, 0
        for run in sample.runs:
            if run.kind == "image" and own < len(sample.images):
                yield ImageSpan(image + own, slot, slot + run.num_tokens, sample.images[own].size)
                own += 1
            slot += run.num_tokens
        image += len(sample.images)


def place_thumbs(canvas: Canvas, row: ShownRow, line: Line) -> float | None:
    """Draw the images whose first token is in a line.

    Returns:
        Where they begin, or None where there is none.
    """
    spans = [span for span in image_spans(row) if line.start <= span.start < line.end]
    if not spans:
        return None
    top, right = canvas.height, canvas.width - 1
    sizes = _fitting(_sizes(spans, line, right), right - line.left)
    shown = spans[: len(sizes)]
    places = [line.x(span.start) for span in shown]
    for k in range(1, len(places)):
        places[k] = max(places[k], places[k - 1] + sizes[k - 1][0] + SPACE)
    limit = right
    for k in reversed(range(len(places))):
        places[k] = min(places[k], limit - sizes[k][0])
        limit = places[k] - SPACE
    tallest = max(height for _, height in sizes)
    for span, x, (width, height) in zip(shown, places, sizes, strict=True):
        y = top + tallest - height
        canvas.add(Thumb(x=x, y=y, width=width, height=height, image=span.image))
        foot = min(max(line.x(span.start), x + 1), x + width - 1)
        token = line.x(span.start)
        points = ((foot, top + tallest + 1), (token, top + tallest + LEAD))
        canvas.add(Path(points=points, color=MUTED, width=0.8))
    canvas.height += tallest + LEAD
    if len(shown) < len(spans):
        note = f"{len(spans) - len(shown)} more images in this line"
        canvas.height += 12
        canvas.add(Text(x=line.left, y=canvas.height - 2, text=note, size=10, color=MUTED))
    return top


def _sizes(spans: list[ImageSpan], line: Line, right: float) -> list[tuple[float, float]]:
    """Each image as large as the next one's place lets it be; the last may move to the left."""
    starts = [line.x(span.start) for span in spans]
    sizes: list[tuple[float, float]] = []
    for span, (start, after) in zip(spans, pairwise([*starts, right]), strict=True):
        room = after - start - SPACE
        if len(sizes) + 1 == len(spans):
            room = right - (starts[-2] + sizes[-1][0] + SPACE if sizes else line.left)
        sizes.append(_size(span.size, room))
    return sizes


def _fitting(sizes: list[tuple[float, float]], room: float) -> list[tuple[float, float]]:
    """As many images as fit side by side, smaller if need be."""
    total = sum(width + SPACE for width, _ in sizes)
    shrink = max(MIN_SHRINK, min(1.0, room / total))
    number, used = 0, 0.0
    while number < len(sizes) and used + sizes[number][0] * shrink <= room:
        used += sizes[number][0] * shrink + SPACE
        number += 1
    return [(width * shrink, height * shrink) for width, height in sizes[: max(1, number)]]


def _size(size: tuple[int, int], room: float) -> tuple[float, float]:
    """Width and height of a thumbnail: its proportions kept, inside the bounds."""
    widest = min(MAX_WIDTH, max(MIN_WIDTH, room))
    scale = min(HEIGHT / size[1], widest / size[0])
    return max(2.0, size[0] * scale), max(2.0, size[1] * scale)


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
    for slot in range(-(-line.start // step) * step, line.end, step):
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
    x, y, room = line.x(body[0]), canvas.height, wide - 8
    tip = f"{segment.number}: {segment.name}, {segment.length:,} tokens"
    canvas.add(Rect(x=x, y=y, width=wide, height=SAMPLE_HEIGHT, fill=fill, tip=tip))
    choices = (
        f"{segment.number} \u00b7 {segment.name} \u00b7 {segment.length:,}",
        f"{segment.number} \u00b7 {segment.length:,}",
        f"{segment.number}",
    )
    for choice in choices:
        if text_width(choice, 11) <= room:
            canvas.add(Text(x=x + 4, y=y + 15, text=choice, color=ink))
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
    for start, end, learns in runs(mask[line.start : line.end], line.start):
        if learns:
            _strip(canvas, line, (start, end), LOSS)
    canvas.height += STRIP_HEIGHT + GAP


def _strip(canvas: Canvas, line: Line, slots: tuple[int, int], fill: str) -> None:
    part = line.cut(*slots)
    if part:
        wide = (part[1] - part[0]) * line.scale
        x, y = line.x(part[0]), canvas.height
        canvas.add(Rect(x=x, y=y, width=wide, height=STRIP_HEIGHT, fill=fill))


def _gap(canvas: Canvas, line: Line, segment: Segment, height: float) -> None:
    """The slots of a segment after its sample, hatched; a tail is named if there is room."""
    gap = line.cut(segment.start + segment.length, segment.end)
    if not gap:
        return
    wide = max(MIN_GAP, (gap[1] - gap[0]) * line.scale)
    x, y = line.x(gap[1]) - wide, canvas.height
    count = segment.slots - segment.length
    what = "tail segment" if segment.sample is None else f"gap behind {segment.name}"
    tip = f"{what}: {count} slots of padding"
    canvas.add(Rect(x=x, y=y, width=wide, height=height, fill=PAD, hatch=PAD_LINES, tip=tip))
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
    start, end, rank = piece
    x, wide = line.x(start), (end - start) * line.scale
    fill, ink = rank_color(rank, size) if rank >= 0 else ("#ffffff", INK)
    tip = f"rank {rank}: slots {start} to {end - 1}"
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
            if line.start < place <= line.end:
                x = line.x(place)
                if dashed:
                    x = min(x, line.x(segment.end) - MIN_GAP)
                points, width = ((x, top - 2), (x, bottom)), 0.8 if dashed else 1.2
                canvas.add(Path(points=points, color=INK, width=width, dashed=dashed))
