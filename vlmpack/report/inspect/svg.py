"""A drawing as SVG for an HTML page; images are drawn by `<use>`, so that each is in it once."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from vlmpack.report.inspect.canvas import Canvas, Path, Rect, Shape, Text, Thumb


def svg(canvas: Canvas, sizes: Sequence[tuple[int, int]], *, name: str, label: str) -> str:
    """The drawing as an `<svg>` element that scales with the page.

    Args:
        canvas: the drawing.
        sizes: (width, height) of the images; the page defines each as a symbol `image-N`.
        name: its class.
        label: what a reader who cannot see it is told.
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
        tip = f"<title>{visible(shape.tip)}</title>" if shape.tip else ""
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
        weight = ' font-weight="600"' if shape.bold else ""
        return (
            f'<text x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size:g}" '
            f'fill="{shape.color}" text-anchor="{shape.anchor}"{weight}>'
            f"{visible(shape.text)}</text>"
        )
    return _thumb(shape, sizes[shape.image])


def _thumb(shape: Thumb, size: tuple[int, int]) -> str:
    scale = shape.width / size[0]
    return (
        f'<use href="#image-{shape.image}" '
        f'transform="translate({shape.x:.2f} {shape.y:.2f}) scale({scale:.4f})"/>'
    )


def visible(text: str) -> str:
    """Escaped for HTML; characters that show nothing, or reorder what follows, by their code.

    Line breaks and tabs stay; whatever else is not printable (control characters, marks that turn
    the writing direction) becomes \\uXXXX.
    """
    shown = "".join(c if c.isprintable() or c in "\n\t" else f"\\u{ord(c):04x}" for c in text)
    return escape(shown)
