"""How pages and pictures look, and the only module that imports matplotlib.

A colour has a name, a value on light pages and one on dark pages. Drawings use the light value;
`svg` replaces it by the name, for the page's style sheet.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from io import BytesIO
from typing import Any

from vlmpack.errors import CapabilityError

WIDTH_INCHES = 9.0
"""100 pixels an inch at the 900 pixels that a README shows; 10 points are then 14 pixels."""

NARROW_INCHES = 4.0
"""A picture for a telephone: 9 points are 11 pixels where it is 370 pixels wide."""

DPI = 200

PALETTE = {
    "page": ("#ffffff", "#14181d"),
    "ink": ("#1f2933", "#e6eaef"),
    "muted": ("#5f6b78", "#a3aebb"),
    "faint": ("#d5dae0", "#39424d"),
    "pad": ("#f3f4f6", "#262d35"),
    "pad-lines": ("#8b96a3", "#77828f"),
    "padding": ("#e4e7eb", "#343d47"),
    "grid": ("#eceff2", "#262d35"),
    "blue": ("#2563a8", "#6aa5e6"),
    "pale-blue": ("#a9c4e4", "#3a5f8a"),
    "orange": ("#b34f08", "#f0954a"),
    "green": ("#1a7f4b", "#4cc38a"),
    "red": ("#b42318", "#ff8a7a"),
    "violet": ("#5b4a8a", "#a897e6"),
    "text-tokens": ("#d9dee4", "#4a5563"),
    "loss": ("#d55e00", "#f0954a"),
    "marked": ("#eef4fa", "#1d2a38"),
    "learnt": ("#fbe0cc", "#4a2c16"),
    "shade": ("#1f29332e", "#e6eaef3d"),
}
"""Name -> (on a light page, on a dark page). Text in any of ink, muted, blue, orange, green, red
and violet has a contrast of 4.5 and more to the page."""

INK, MUTED, FAINT, PADDING, BLUE, PALE_BLUE, ORANGE, GREEN, RED = (
    PALETTE[name][0]
    for name in (
        *("ink", "muted", "faint", "padding", "blue", "pale-blue", "orange", "green", "red"),
    )
)
SEGMENTS = ("#2563a8", "#5b93c9", "#8fb8de", "#3f7a8c")
"""Neighbouring samples take different ones."""

SMALL = 9.0
NORMAL = 10.0
LARGE = 12.0
"""Font sizes in points."""

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": NORMAL,
    "text.color": INK,
    "text.parse_math": False,
    "axes.labelcolor": MUTED,
    "axes.labelsize": SMALL,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 1.0,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": NORMAL,
    "axes.formatter.useoffset": False,
    "axes.unicode_minus": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "grid.color": PALETTE["grid"][0],
    "figure.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "vlmpack",
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
    body = re.sub("#[0-9a-f]{6}", lambda found: _by_name(found[0]), body)
    return f'<svg {box[0]} role="img" aria-label="{escape(label)}">{body}'


def _by_name(color: str) -> str:
    """A colour of the palette by its name, any other as it is."""
    names = (name for name, (light, _) in PALETTE.items() if light == color)
    return next((f"var(--{name})" for name in names), color)
