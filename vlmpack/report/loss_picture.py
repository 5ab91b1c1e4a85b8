"""loss.png, and its form in the page: the loss of every step, smoothed and validated, over the
learning rate; between them the load-balancing loss of experts, where a run reports one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlmpack.evaluation.metrics import written_metrics
from vlmpack.report.picture import Picture
from vlmpack.report.run_files import RunFiles
from vlmpack.report.style import (
    BLUE,
    LARGE,
    MUTED,
    NARROW_INCHES,
    NORMAL,
    ORANGE,
    PALE_BLUE,
    SMALL,
    WIDTH_INCHES,
    figure,
    percent,
    png,
    svg,
)

HEIGHT_INCHES = 4.6
LOG_SCALE_RATIO = 20
"""The loss axis is logarithmic where the smoothed loss falls by more than this factor."""

LABEL_GAP = 0.062
"""Smallest distance of two labels at the right edge, as a share of the axis' height."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How large the picture is, and where its axes lie, as shares of it.

    Args:
        width, height: inches.
        left, right, top, bottom: of the axes.
        labels_above: the curves are named above their axes, where there is no room beside them.
    """

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    labels_above: bool = False


_FILE = _Form(WIDTH_INCHES, HEIGHT_INCHES, 0.085, 0.84, 0.86, 0.115)
_WIDE = _Form(WIDTH_INCHES, 4.2, 0.085, 0.84, 0.97, 0.125)
_NARROW = _Form(NARROW_INCHES, 3.4, 0.16, 0.97, 0.91, 0.14, labels_above=True)


def draw_loss(run: RunFiles) -> bytes | None:
    """The file; None where no step has a loss."""
    if not run.series("loss")[0]:
        return None
    with figure(_FILE.height) as drawing:
        _draw(drawing, run, _FILE)
        drawing.text(_FILE.left, 0.935, "Training loss", fontsize=LARGE, weight="bold")
        drawing.text(_FILE.right, 0.935, _headline(run), fontsize=NORMAL, ha="right")
        return png(drawing)


def loss_picture(run: RunFiles) -> Picture | None:
    """The same for the page, wide and narrow; None where no step has a loss."""
    if not run.series("loss")[0]:
        return None
    caption = "Loss of every step, smoothed, with validation and learning rate"
    made = []
    for name, form in (("loss-narrow", _NARROW), ("loss-wide", _WIDE)):
        with figure(form.height, form.width) as drawing:
            _draw(drawing, run, form)
            made.append(svg(drawing, name, caption))
    return Picture("Training loss", caption, *made)


def _draw(drawing: Any, run: RunFiles, form: _Form) -> None:
    steps, losses = run.series("loss")
    routers = run.series("router_loss")
    heights = (4, 1, 1) if routers[0] else (4, 1)
    grid = drawing.add_gridspec(
        len(heights), 1, height_ratios=heights, hspace=0.45 if form.labels_above else 0.2,
        left=form.left, right=form.right, top=form.top, bottom=form.bottom,
    )  # fmt: skip
    top = drawing.add_subplot(grid[0])
    bottom = drawing.add_subplot(grid[-1], sharex=top)
    _draw_losses(top, run, steps, losses, form)
    if routers[0]:
        _draw_router_loss(drawing.add_subplot(grid[1], sharex=top), *routers, form)
    _draw_learning_rate(bottom, run, form)
    span = max(1, steps[-1] - steps[0])
    top.set_xlim(steps[0] - 0.01 * span, steps[-1] + 0.01 * span)
    if len(steps) == 1:
        bottom.set_xticks(steps)


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Exponential moving average with the weight of `span` values, unbiased at the start."""
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    averages: list[float] = []
    for value in values:
        total = keep * total + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        averages.append(total / weight)
    return averages


def _draw_losses(
    axes: Any, run: RunFiles, steps: list[int], losses: list[float], form: _Form
) -> None:
    smoothed = smooth(losses, max(1, len(losses) // 40))
    marker = "o" if len(steps) <= 3 else None
    labels = [(f"train {smoothed[-1]:.3g}", smoothed[-1], BLUE)]
    if smoothed != losses:
        axes.plot(steps, losses, color=PALE_BLUE, linewidth=0.7)
    axes.plot(steps, smoothed, color=BLUE, linewidth=1.8, marker=marker, markersize=5)
    places, checks = run.series("validation_loss")
    if places:
        axes.plot(places, checks, color=ORANGE, linewidth=1.0, marker="o", markersize=4.5)
        labels.append((f"validation {checks[-1]:.3g}", checks[-1], ORANGE))
    shown = [*smoothed, *checks]
    if min(losses) > 0 and max(shown) > LOG_SCALE_RATIO * min(shown):
        axes.set_yscale("log")
        axes.set_ylabel(f"loss per {run.unit} (log)")
        _plain_log_ticks(axes)
    else:
        axes.set_ylabel(f"loss per {run.unit}")
        axes.set_ylim(bottom=min(0.0, *losses), top=1.05 * max(*losses, *checks, 1e-9))
    axes.grid(axis="y")
    axes.tick_params(labelbottom=False, bottom=False)
    _label_ends(axes, labels, form)


def _plain_log_ticks(axes: Any) -> None:
    """0.01, 0.1, 1 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _label_ends(axes: Any, labels: Sequence[tuple[str, float, str]], form: _Form) -> None:
    """Write each curve's name and last value beside its end, moved apart where they would touch."""
    if form.labels_above:
        for (text, _, colour), (place, side) in zip(
            labels, ((0.0, "left"), (1.0, "right")), strict=False
        ):
            _above(axes, text, colour, place, side)
        return
    to_share = (axes.transData + axes.transAxes.inverted()).transform
    ordered = sorted(labels, key=lambda label: label[1])
    heights = [min(1.0, max(0.0, float(to_share((0, value))[1]))) for _, value, _ in ordered]
    if len(heights) == 2 and heights[1] - heights[0] < LABEL_GAP:
        middle = max(LABEL_GAP / 2, sum(heights) / 2)
        heights = [middle - LABEL_GAP / 2, middle + LABEL_GAP / 2]
    for (text, _, colour), height in zip(ordered, heights, strict=True):
        axes.text(
            1.015, height, text, transform=axes.transAxes, color=colour, va="center", fontsize=SMALL
        )


def _above(axes: Any, text: str, colour: str, place: float = 0.0, side: str = "left") -> None:
    """A curve's name above its axes."""
    axes.text(
        place, 1.04, text, transform=axes.transAxes, color=colour, ha=side, va="bottom",
        fontsize=SMALL,
    )  # fmt: skip


def _beside(axes: Any, text: str, colour: str) -> None:
    """A curve's name at the right of its axes."""
    axes.text(1.015, 0.5, text, transform=axes.transAxes, color=colour, va="center", fontsize=SMALL)


def _draw_router_loss(axes: Any, steps: list[int], losses: list[float], form: _Form) -> None:
    """Where all experts are chosen alike it is 1."""
    smoothed = smooth(losses, max(1, len(losses) // 40))
    marker = "o" if len(steps) <= 3 else None
    if smoothed != losses:
        axes.plot(steps, losses, color=PALE_BLUE, linewidth=0.7)
    axes.plot(steps, smoothed, color=BLUE, linewidth=1.2, marker=marker, markersize=4)
    axes.set_ylim(bottom=min(1.0, *losses), top=1.02 * max(1.0, *losses))
    axes.tick_params(labelbottom=False, bottom=False)
    value = f"router {smoothed[-1]:.3g}"
    if form.labels_above:
        _above(axes, f"{value} (1: balanced)", BLUE)
    else:
        _beside(axes, f"{value}\n(1: balanced)", BLUE)


def _draw_learning_rate(axes: Any, run: RunFiles, form: _Form) -> None:
    steps, rates = run.series("learning_rate")
    marker = "o" if len(steps) <= 3 else None
    axes.plot(steps, rates, color=MUTED, linewidth=1.2, marker=marker, markersize=4)
    axes.set_ylim(bottom=0, top=1.15 * max([*rates, 1e-12]))
    axes.set_yticks([0, max(rates)] if rates and max(rates) > 0 else [0])
    axes.set_yticklabels(["0", f"{max(rates):.3g}"] if rates and max(rates) > 0 else ["0"])
    axes.set_xlabel("optimizer step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    (_above if form.labels_above else _beside)(axes, "learning rate", MUTED)


def _headline(run: RunFiles) -> str:
    """The first metric before and after, as far as it is known."""
    before, after = written_metrics(run.result, "before"), written_metrics(run.result, "after")
    if not after:
        return ""
    name = next(iter(after))
    start = f"{percent(before[name])} before, " if name in before else ""
    asked = f"{'unseen' if run.seen == '' else 'test'} questions"
    return f"{name.replace('_', ' ')} on {asked}: {start}{percent(after[name])} after"
