"""The comparison as one HTML file: the curves, then every table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmpack.report.compare.align import relative
from vlmpack.report.compare.comparison import Comparison
from vlmpack.report.compare.read import ComparedRun
from vlmpack.report.compare.sections import sections, verdict
from vlmpack.report.document import render
from vlmpack.report.loss_picture import smooth
from vlmpack.report.picture import Picture
from vlmpack.report.style import (
    BLUE,
    MUTED,
    NARROW_INCHES,
    ORANGE,
    SMALL,
    WIDTH_INCHES,
    figure,
    svg,
)
from vlmpack.whole_file import write_atomically

COLORS = (BLUE, ORANGE)


def write_page(found: Comparison, path: Path) -> None:
    """Draw the curves and write the page.

    Raises:
        CapabilityError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    write_atomically(path, render_page(found))


def render_page(found: Comparison) -> str:
    """The page as HTML."""
    runs, *tables = sections(found)
    return render(
        "compare.html",
        title=f"{found.a.files.name} and {found.b.files.name}",
        runs=[f"{run.label}: {run.path}" for run in (found.a, found.b)],
        verdict=verdict(found),
        is_comparable=not found.reasons,
        lines=[line for line in runs.lines[2:] if line not in verdict(found)],
        picture=draw(found),
        sections=tables,
    )


def draw(found: Comparison) -> Picture:
    """Both losses over the samples seen, and, where steps trained the same, how far they part."""
    units = [run.files.unit for run in (found.a, found.b)]
    per = ["" if units[0] == units[1] else f" (per {unit})" for unit in units]
    caption = f"Loss by samples seen, smoothed: A in blue{per[0]}, B in orange{per[1]}"
    if found.parted is not None:
        caption += "; below, the difference at steps of the same samples, relative to the loss"
    made = []
    for name, width, height in (("narrow", NARROW_INCHES, 3.4), ("wide", WIDTH_INCHES, 4.4)):
        with figure(height, width) as drawing:
            _draw(drawing, found, left=0.75 / width, right=1 - 0.1 / width)
            made.append(svg(drawing, f"compared-{name}", caption))
    return Picture("Loss", caption, *made)


def _draw(drawing: Any, found: Comparison, *, left: float, right: float) -> None:
    heights = (3, 1.2) if found.parted is not None else (1,)
    grid = drawing.add_gridspec(
        len(heights), 1, height_ratios=heights, hspace=0.35, left=left, right=right, top=0.92,
        bottom=0.14,
    )  # fmt: skip
    top = drawing.add_subplot(grid[0])
    for run, color, style in zip((found.a, found.b), COLORS, ("-", (0, (4, 2))), strict=True):
        _curve(top, run, color, style)
    for place, side, run, color in zip(
        (0.0, 1.0), ("left", "right"), (found.a, found.b), COLORS, strict=True
    ):
        last = [*run.losses.values()][-1].loss
        top.text(
            place, 1.03, f"{run.label} {last:.4g}", transform=top.transAxes, color=color, ha=side,
            va="bottom", fontsize=SMALL,
        )  # fmt: skip
    top.grid(axis="y")
    units = {run.files.unit for run in (found.a, found.b)}
    top.set_ylabel(f"loss per {found.a.files.unit}" if len(units) == 1 else "loss, in two units")
    bottom = top
    if found.parted is not None:
        bottom = drawing.add_subplot(grid[1], sharex=top)
        _differences(bottom, found, found.parted.noise)
        top.tick_params(labelbottom=False, bottom=False)
    bottom.set_xlabel("samples seen")
    bottom.xaxis.get_major_locator().set_params(integer=True, nbins=5)
    bottom.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _curve(axes: Any, run: ComparedRun, color: str, style: Any) -> None:
    steps = [*run.losses.values()]
    losses = smooth([one.loss for one in steps], max(1, len(steps) // 40))
    marker = "o" if len(steps) <= 3 else None
    axes.plot(
        [one.samples for one in steps], losses, color=color, linestyle=style, linewidth=1.6,
        marker=marker, markersize=5,
    )  # fmt: skip


def _differences(axes: Any, found: Comparison, noise: float) -> None:
    """On a scale of powers of ten; equal losses lie on its lower edge."""
    a, b = found.a.losses, found.b.losses
    places = [a[step].samples for step in found.same.steps]
    values = [relative(a[step].loss, b[step].loss) for step in found.same.steps]
    least = min((value for value in (noise, *values) if value), default=1e-7) / 10
    axes.plot(
        places, [max(value, least) for value in values], color=MUTED, linewidth=0.8, marker="o",
        markersize=2.5,
    )  # fmt: skip
    if noise:
        axes.axhline(noise, color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
    axes.set_yscale("log")
    axes.set_ylim(least / 2, 10 * max([10 * least, noise, *values]))
    axes.yaxis.get_major_locator().set_params(numticks=4)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
    axes.minorticks_off()
    axes.set_ylabel("apart")
