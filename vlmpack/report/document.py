"""HTML pages from the templates of this folder, with their pictures, images and tables.

A page is one file that needs no others. All text is escaped. Tables and short texts of figures are
for a terminal too. No other module imports matplotlib.

A colour has a name, a value on light pages and one on dark pages. Drawings use the light value;
`svg` replaces it by the name, for the page's style sheet.
"""

from __future__ import annotations

import base64
import html
import io
import re
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from io import BytesIO
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from PIL import Image

from vlmpack.encode.decode import IMAGE_FORMATS
from vlmpack.errors import CapabilityError

WIDTH_INCHES = 9.0
"""100 pixels an inch at the 900 pixels that a README shows; 10 points are then 14 pixels."""

NARROW_INCHES = 4.0
"""A picture for a telephone: 9 points are 11 pixels where it is 370 pixels wide."""

DPI = 200

_LOOK = tomllib.loads(
    files("vlmpack.report").joinpath("templates", "look.toml").read_text(encoding="utf-8")
)
PALETTE: dict[str, tuple[str, str]] = {name: tuple(pair) for name, pair in _LOOK["palette"].items()}
"""Name -> (on a light page, on a dark page)."""

_NAMES = ("ink", "muted", "faint", "padding", "blue", "pale-blue", "orange", "green", "red")
INK, MUTED, FAINT, PADDING, BLUE, PALE_BLUE, ORANGE, GREEN, RED = (
    PALETTE[name][0] for name in _NAMES
)
SEGMENTS = ("#2563a8", "#5b93c9", "#8fb8de", "#3f7a8c")
"""Neighbouring samples take different ones."""

SMALL = 9.0
NORMAL = 10.0
LARGE = 12.0
"""Font sizes in points."""

_STYLE: dict[str, Any] = {
    name: PALETTE[value][0] if value in PALETTE else value
    for name, value in _LOOK["matplotlib"].items()
}


@contextmanager
def figure(height_inches: float, width_inches: float = WIDTH_INCHES) -> Iterator[Any]:
    """A matplotlib Figure, of README width, in the report's style, without any global state.

    Raises:
        CapabilityError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CapabilityError(
            "the report's pictures need matplotlib, which is not installed; "
            "pip install 'matplotlib>=3.9'"
        ) from error
    style: Any = _STYLE  # its keys are a literal type in some versions
    with matplotlib.rc_context(style):
        yield Figure(figsize=(width_inches, height_inches), dpi=DPI)


def png(drawing: Any) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(drawing)
    data = BytesIO()
    with warnings.catch_warnings():
        # Text of the data may use a script that the font lacks: boxes, no failure.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        drawing.savefig(data, format="png", dpi=DPI, metadata={"Software": None})
    return data.getvalue()


def svg(drawing: Any, name: str, label: str) -> str:
    """A figure as an `<svg>` element of a page, its colours by name.

    Args:
        name: unique among the drawings of the page.
        label: its description for screen readers.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(drawing)
    data = BytesIO()
    about = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        drawing.savefig(data, format="svg", transparent=True, metadata=about)
    text = data.getvalue().decode("utf-8")
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    body = text[text.index(">", box.end()) + 1 :]
    body = re.sub(r"\s*<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", body)
    body = body.replace("'DejaVu Sans'", "'DejaVu Sans', sans-serif")
    body = re.sub("#[0-9a-f]{6}", lambda match: _by_name(match[0]), body)
    return f'<svg {box[0]} role="img" aria-label="{html.escape(label)}">{body}'


def _by_name(color: str) -> str:
    """A colour of the palette by its name, any other as it is."""
    names = (name for name, (light, _) in PALETTE.items() if light == color)
    return next((f"var(--{name})" for name in names), color)


def render(template: str, **values: object) -> str:
    """A page as HTML."""
    loader = PackageLoader("vlmpack.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["visible"] = written_out
    environment.filters["breakable"] = breakable
    environment.globals["palette"] = PALETTE
    page = environment.get_template(template).render(values)
    return page.encode("utf-8", "backslashreplace").decode()  # names of files need not be UTF-8


def breakable(text: str) -> Markup:
    """The text, escaped, with places where a narrow column may break long names."""
    return Markup(re.sub(r"(?<=\w)([._/])(?=[^\W\d])", r"\1<wbr>", str(escape(text))))


def written_out(text: str) -> str:
    """The text with characters that show nothing, or reorder what follows, by their code.

    Line breaks and tabs stay; whatever else is not printable (control characters, marks that turn
    the writing direction) becomes \\uXXXX.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\u{ord(c):04x}" for c in text)


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing.

    Args:
        caption: below it, and its description for screen readers.
        narrow: an `<svg>` element for a telephone and for columns.
        wide: another one for a wide page, if there is one.
    """

    title: str
    caption: str
    narrow: str
    wide: str = ""


MAX_SIDE = 640
MAX_PNG_PIXELS = 1 << 16
"""The largest side and the most pixels of an image that stays a PNG."""


class Thumbnail(NamedTuple):
    """An image in a page."""

    url: str
    size: tuple[int, int]


def thumbnail(image: Image.Image, max_side: int = MAX_SIDE) -> Thumbnail:
    """The image, smaller if it is large: photos as JPEG, small images with every pixel."""
    small, data = image.convert("RGB"), io.BytesIO()
    small.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    kind = "JPEG" if small.width * small.height > MAX_PNG_PIXELS else "PNG"
    small.save(data, kind, quality=85)
    encoded = base64.b64encode(data.getvalue()).decode("ascii")
    return Thumbnail(f"data:image/{kind.lower()};base64,{encoded}", small.size)


def thumbnails(decoded: Sequence[Image.Image | None], max_side: int = MAX_SIDE) -> tuple[str, ...]:
    """Addresses of images; () where one of them could not be read."""
    return tuple(thumbnail(one, max_side).url for one in decoded if one) if all(decoded) else ()


def decode(data: bytes) -> Image.Image | None:
    """The image in RGB, or None if it cannot be read."""
    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading, one or two lines, and whether it holds words (left) or figures."""

    name: str
    is_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table.

    Args:
        marked: places of rows that stand out: what the recipe has.
    """

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    marked: tuple[int, ...] = ()
    lines: tuple[str, ...] = field(default=())

    @staticmethod
    def of_figures(
        title: str,
        heads: Sequence[str],
        rows: Iterable[tuple[str, ...]],
        *lines: str,
        words: int = 1,
        marked: Iterable[int] = (),
    ) -> Section:
        """A table with words in its first columns and figures in the others."""
        columns = tuple(Column(head, is_text=n < words) for n, head in enumerate(heads))
        return Section(
            title=title, columns=columns, rows=tuple(rows), lines=lines, marked=tuple(marked)
        )

    @property
    def heads(self) -> tuple[tuple[str, bool], ...]:
        return tuple((column.name, column.is_text) for column in self.columns)


def compact(value: float) -> str:
    """A number below 10,000 in full, a larger one with three or four digits, as in `179.8k`."""
    if abs(value) < 10_000:
        whole = round(value)
        return f"{whole:,}" if abs(value - whole) < 0.05 or abs(value) >= 100 else f"{value:.1f}"
    unit = next((unit for unit in range(3) if abs(value) < 999.5 * 1000 ** (unit + 1)), 3)
    value /= 1000 ** (unit + 1)
    return f"{value:.{4 if abs(value) >= 100 else 3}g}" + "kMGT"[unit]


def share(value: float, digits: int = 1) -> str:
    """0.8125 -> 81.2%; what is not nothing is never shown as 0 or as all."""
    text = f"{value:.{digits}%}"
    least = 10.0 ** -(digits + 2)
    if 0 < value < least / 2:
        return f"<{least:.{digits}%}"
    if 1 - least / 2 < value < 1:
        return f">{1 - least:.{digits}%}"
    return text


def percent(share: float, digits: int = 1) -> str:
    return f"{share:.{digits}%}"


def one_line(text: str) -> str:
    """Control characters and line breaks out, so that data cannot move what is drawn."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "\u2026"


def times(value: float) -> str:
    return f"{value:.3f}"
