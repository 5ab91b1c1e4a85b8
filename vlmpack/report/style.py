"""How the pictures look, and the one place that imports matplotlib."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

from vlmpack.errors import CapabilityError

WIDTH_INCHES = 9.0
"""100 pixels an inch at the 900 pixels that a README shows; 10 points are then 14 pixels."""

DPI = 200

INK = "#1f2933"
MUTED = "#6b7785"
FAINT = "#d5dae0"
PADDING = "#e4e7eb"
BLUE = "#2563a8"
PALE_BLUE = "#a9c4e4"
ORANGE = "#c2570c"
GREEN = "#1a7f4b"
RED = "#b42318"
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
    "grid.color": "#eceff2",
    "figure.facecolor": "white",
    "svg.fonttype": "none",
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
    """A figure as a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(drawing)
    data = BytesIO()
    with warnings.catch_warnings():
        # Text of the data may use a script that the font lacks: boxes, no failure.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        drawing.savefig(data, format="png", dpi=DPI, metadata={"Software": None})
    return data.getvalue()


def percent(share: float, digits: int = 1) -> str:
    """A share as text: 0.8125 -> 81.2%."""
    return f"{share:.{digits}%}"


def one_line(text: str) -> str:
    """Control characters and line breaks out, so that data cannot move what is drawn."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters, the last of them an ellipsis where some were cut."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "\u2026"
