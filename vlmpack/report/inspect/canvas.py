"""A drawing as a list of shapes, in pixels from the left and top, written as SVG for an HTML page.

Images are drawn by `<use>`, so that each is in the page once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from typing import Literal

from PIL import ImageFont

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
