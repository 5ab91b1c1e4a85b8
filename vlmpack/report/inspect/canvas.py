"""A drawing as a list of shapes, in pixels from the left and top; `svg` and `png` write it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from PIL import ImageFont

INK = "#1f2933"
MUTED = "#5f6b78"
FAINT = "#d5dae0"
GOOD = "#0072b2"
BAD = "#d55e00"
"""Blue and vermillion of Okabe and Ito's colours, which colour-blind people tell apart."""

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

    def moved(self, right: float, down: float) -> Rect:
        """The same, further right and down."""
        return replace(self, x=self.x + right, y=self.y + down)


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Lines through some points."""

    points: tuple[tuple[float, float], ...]
    color: str
    width: float = 1.0
    dashed: bool = False

    def moved(self, right: float, down: float) -> Path:
        """The same, further right and down."""
        return replace(self, points=tuple((x + right, y + down) for x, y in self.points))


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One line; `y` is its baseline."""

    x: float
    y: float
    text: str
    size: float = 11.0
    color: str = INK
    anchor: Anchor = "start"
    bold: bool = False

    def moved(self, right: float, down: float) -> Text:
        """The same, further right and down."""
        return replace(self, x=self.x + right, y=self.y + down)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thumb:
    """An image of the row, by its number."""

    x: float
    y: float
    width: float
    height: float
    image: int

    def moved(self, right: float, down: float) -> Thumb:
        """The same, further right and down."""
        return replace(self, x=self.x + right, y=self.y + down)


Shape = Rect | Path | Text | Thumb


@dataclass(slots=True)
class Canvas:
    """Shapes in the order they are drawn.

    Args:
        width: of the drawing.
        height: grows as things are drawn.
    """

    width: float
    height: float = 0.0
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Draw on top of what is there."""
        self.shapes += shapes

    def mark(self, x: float, y: float, holds: bool) -> None:
        """A tick or a cross, 10 high, with its lower end at `y`."""
        if holds:
            points = ((x, y - 4), (x + 3.5, y), (x + 10, y - 9))
            self.add(Path(points=points, color=GOOD, width=2.4))
            return
        for first, second in (((x, y - 9), (x + 9, y)), ((x, y), (x + 9, y - 9))):
            self.add(Path(points=(first, second), color=BAD, width=2.4))


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
    """Pillow's own font."""
    return ImageFont.load_default(size)
