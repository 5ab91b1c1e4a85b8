"""`loss.png` and `lengths.png`, and their forms in the page.

`loss.png` has the loss of every step, smoothed and validated, over the samples seen. `lengths.png`
has the lengths of the samples, and one micro-batch drawn to scale, padded and packed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmpack.evaluation.metrics import written_metrics
from vlmpack.report.document import (
    BLUE,
    FAINT,
    INK,
    LARGE,
    MUTED,
    NARROW_INCHES,
    NORMAL,
    ORANGE,
    PADDING,
    PALE_BLUE,
    SEGMENTS,
    SMALL,
    WIDTH_INCHES,
    Picture,
    figure,
    percent,
    png,
    svg,
)
from vlmpack.report.run_files import DataSummary, RunFiles
from vlmpack.words import counted

LOSS_INCHES = 4.6
LOG_SCALE_RATIO = 20
"""The loss axis is logarithmic where the smoothed loss falls by more than this factor."""

LABEL_GAP = 0.062
"""Smallest distance of two labels at the right edge, as a share of the axis' height."""


@dataclass(frozen=True, slots=True)
class _Form:
    """The picture's size in inches, and the place of its axes in shares of it."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    labels_above: bool = False


_FILE = _Form(WIDTH_INCHES, LOSS_INCHES, 0.085, 0.84, 0.86, 0.115)
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


def draw_curve(axes: Any, steps: Sequence[int], values: Sequence[float], **style: Any) -> None:
    """A line; few points are marked, since a line alone would not show them."""
    axes.plot(steps, values, marker="o" if len(steps) <= 3 else None, **style)


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
    smoothed = _draw_smoothed(axes, steps, losses, linewidth=1.8, markersize=5)
    labels = [(f"train {smoothed[-1]:.3g}", smoothed[-1], BLUE)]
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


def _draw_smoothed(axes: Any, steps: list[int], losses: list[float], **style: float) -> list[float]:
    smoothed = smooth(losses, max(1, len(losses) // 40))
    if smoothed != losses:
        axes.plot(steps, losses, color=PALE_BLUE, linewidth=0.7)
    draw_curve(axes, steps, smoothed, color=BLUE, **style)
    return smoothed


def _plain_log_ticks(axes: Any) -> None:
    """0.01, 0.1, 1 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _label_ends(axes: Any, labels: Sequence[tuple[str, float, str]], form: _Form) -> None:
    """Write each curve's name and last value at its end, moved apart where they would touch."""
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
    axes.text(
        place, 1.04, text, transform=axes.transAxes, color=colour, ha=side, va="bottom",
        fontsize=SMALL,
    )  # fmt: skip


def _right_of(axes: Any, text: str, colour: str) -> None:
    axes.text(1.015, 0.5, text, transform=axes.transAxes, color=colour, va="center", fontsize=SMALL)


def _draw_router_loss(axes: Any, steps: list[int], losses: list[float], form: _Form) -> None:
    """Where all experts are chosen alike it is 1."""
    smoothed = _draw_smoothed(axes, steps, losses, linewidth=1.2, markersize=4)
    axes.set_ylim(bottom=min(1.0, *losses), top=1.02 * max(1.0, *losses))
    axes.tick_params(labelbottom=False, bottom=False)
    value = f"router {smoothed[-1]:.3g}"
    if form.labels_above:
        _above(axes, f"{value} (1: balanced)", BLUE)
    else:
        _right_of(axes, f"{value}\n(1: balanced)", BLUE)


def _draw_learning_rate(axes: Any, run: RunFiles, form: _Form) -> None:
    steps, rates = run.series("learning_rate")
    draw_curve(axes, steps, rates, color=MUTED, linewidth=1.2, markersize=4)
    axes.set_ylim(bottom=0, top=1.15 * max([*rates, 1e-12]))
    axes.set_yticks([0, max(rates)] if rates and max(rates) > 0 else [0])
    axes.set_yticklabels(["0", f"{max(rates):.3g}"] if rates and max(rates) > 0 else ["0"])
    axes.set_xlabel("optimizer step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    (_above if form.labels_above else _right_of)(axes, "learning rate", MUTED)


def _headline(run: RunFiles) -> str:
    """The first metric before and after, as far as it is known."""
    before, after = written_metrics(run.result, "before"), written_metrics(run.result, "after")
    if not after:
        return ""
    name = next(iter(after))
    start = f"{percent(before[name])} before, " if name in before else ""
    questions = f"{'unseen' if run.seen == '' else 'test'} questions"
    return f"{name.replace('_', ' ')} on {questions}: {start}{percent(after[name])} after"


LENGTHS_INCHES = 4.3
NARROW_HEIGHT = 3.0
NUM_BARS = 36
PERCENTILES = ((0.05, "5%"), (0.5, "half"), (0.95, "95%"))
MAX_ROWS_DRAWN = 24
"""Micro-batches of more samples are drawn in part, since thinner rows look alike."""


def draw_lengths(run: RunFiles) -> bytes | None:
    data = run.data
    if data is None or not data.lengths:
        return None
    with figure(LENGTHS_INCHES) as drawing:
        left = drawing.add_axes((0.065, 0.13, 0.36, 0.64))
        _draw_histogram(left, data.lengths)
        drawing.text(0.065, 0.925, "Sample lengths", fontsize=LARGE, weight="bold")
        count = sum(data.lengths.values())
        samples = counted(count, "training sample")
        drawing.text(0.065, 0.865, samples, fontsize=SMALL, color=MUTED)
        drawing.text(0.5, 0.925, _claim(data), fontsize=LARGE, weight="bold")
        drawing.text(0.5, 0.865, _figures(data), fontsize=SMALL, color=MUTED)
        if data.micro_batches:
            right = drawing.add_axes((0.5, 0.13, 0.485, 0.69))
            _draw_to_scale(right, typical_batch(data))
        return png(drawing)


def lengths_pictures(run: RunFiles) -> list[Picture]:
    """The same for the page, in halves; empty where the run has no data summary or no lengths."""
    data = run.data
    if data is None or not data.lengths:
        return []
    count = counted(sum(data.lengths.values()), "training sample")
    caption = f"{count} by tokens, image tokens included. {_percentiles(data.lengths, ', ')}"
    with figure(NARROW_HEIGHT, NARROW_INCHES) as drawing:
        _draw_histogram(drawing.add_axes((0.16, 0.18, 0.81, 0.72)), data.lengths)
        made = [Picture("Sample lengths", caption, svg(drawing, "lengths", caption))]
    if data.micro_batches:
        caption = f"One micro-batch to scale, padding in grey. {_figures(data)}"
        with figure(NARROW_HEIGHT, NARROW_INCHES) as drawing:
            axes = drawing.add_axes((0.04, 0.18, 0.93, 0.8))
            _draw_to_scale(axes, typical_batch(data), is_narrow=True)
            made.append(Picture(_claim(data), caption, svg(drawing, "packed", caption)))
    return made


def padding_removed(data: DataSummary) -> float:
    """Share of the padded slots that are not computed when packed, 0 to 1."""
    return 1 - data.packed_tokens / data.padded_tokens if data.padded_tokens else 0.0


def percentile(lengths: Mapping[int, int], share: float) -> int:
    """The smallest length that at least `share` of the samples do not exceed."""
    target = share * sum(lengths.values())
    seen = 0
    for length in sorted(lengths):
        seen += lengths[length]
        if seen >= target:
            return length
    raise ValueError("no lengths")


def typical_batch(data: DataSummary) -> tuple[int, ...]:
    """The example whose share of padding is nearest to the whole run's."""
    padding = 1 - data.real_tokens / data.padded_tokens if data.padded_tokens else 0.0

    def distance(batch: tuple[int, ...]) -> float:
        return abs(1 - sum(batch) / (len(batch) * max(batch)) - padding)

    return min(data.micro_batches, key=distance)


def _draw_histogram(axes: Any, lengths: Mapping[int, int]) -> None:
    longest, shortest = max(lengths), min(lengths)
    width = max(1, -(-(longest - shortest + 1) // NUM_BARS))
    bars: dict[int, int] = {}
    for length, count in lengths.items():
        start = shortest + (length - shortest) // width * width
        bars[start] = bars.get(start, 0) + count
    axes.bar(
        list(bars), list(bars.values()), width=0.88 * width, align="edge", color=BLUE, linewidth=0
    )
    top = max(bars.values())
    axes.set_ylim(0, top)
    axes.set_xlim(0, longest + width)
    axes.set_xlabel("tokens, image tokens included")
    axes.set_ylabel("samples")
    axes.grid(axis="y")
    axes.yaxis.get_major_locator().set_params(integer=True, nbins=5)
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
    _mark_percentiles(axes, lengths)


def _mark_percentiles(axes: Any, lengths: Mapping[int, int]) -> None:
    """5th, 50th and 95th percentile as ticks above the bars; one line of text names them."""
    for share, _ in PERCENTILES:
        value = percentile(lengths, share)
        axes.plot(
            [value, value], [1.0, 1.04], color=INK, linewidth=1.2,
            transform=axes.get_xaxis_transform(), clip_on=False,
        )  # fmt: skip
    axes.text(
        1.0, 1.06, _percentiles(lengths, "   "), transform=axes.transAxes, ha="right", va="bottom",
        fontsize=SMALL, color=INK,
    )  # fmt: skip


def _percentiles(lengths: Mapping[int, int], between: str) -> str:
    return between.join(
        f"{name} \u2264 {percentile(lengths, share):,}" for share, name in PERCENTILES
    )


def _draw_to_scale(axes: Any, batch: Sequence[int], *, is_narrow: bool = False) -> None:
    """Rows of one token scale: padded rows above, the packed row below."""
    drawn = batch[:MAX_ROWS_DRAWN]
    longest, total = max(drawn), sum(drawn)
    for row, length in enumerate(drawn):
        colour = SEGMENTS[row % len(SEGMENTS)]
        axes.barh(-row, longest, height=0.8, color=PADDING, linewidth=0)
        axes.barh(-row, length, height=0.8, color=colour, linewidth=0)
    bottom = -len(drawn) - 1.5 - 0.06 * len(drawn)
    start = 0
    for row, length in enumerate(drawn):
        axes.barh(
            bottom, length, left=start, height=0.8, color=SEGMENTS[row % len(SEGMENTS)], linewidth=0
        )
        start += length
    part = "" if len(drawn) == len(batch) else f" (first {len(drawn)} of {len(batch)} samples)"
    padded = f"padded: {len(drawn)} x {longest:,} = {len(drawn) * longest:,} slots"
    text = (
        f"One micro-batch to scale{part}\n{padded},\n"
        f"{percent(1 - total / (len(drawn) * longest), 0)} of them padding (grey)"
    )
    if is_narrow:
        text = padded
    wide = max(total, longest)
    room = longest < 0.5 * wide and not is_narrow
    axes.text(
        longest + 0.03 * wide if room else 0 if is_narrow else wide, 0.5 if room else 1.0, text,
        fontsize=SMALL if is_narrow else NORMAL, color=INK, va="top" if room else "bottom",
        ha="left" if room or is_narrow else "right", linespacing=1.5,
    )  # fmt: skip
    axes.text(
        0, bottom - 0.7, f"packed: 1 x {total:,} slots, the same samples end to end",
        fontsize=SMALL if is_narrow else NORMAL, color=INK, va="top",
    )  # fmt: skip
    axes.set_xlim(0, wide)
    axes.set_ylim(bottom - 2.2 - 0.1 * len(drawn), 0.6 if room else 4.0)
    axes.set_yticks([])
    axes.set_xlabel("tokens of a row")
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)


def _claim(data: DataSummary) -> str:
    share = percent(padding_removed(data), 0)
    if data.packing_mode == "none":
        return f"Packing would remove {share} of the slots"
    return f"Packing removes {share} of the slots"


def _figures(data: DataSummary) -> str:
    return (
        f"{data.padded_tokens:,} padded, {data.packed_tokens:,} packed, "
        f"{data.real_tokens:,} real tokens in an epoch"
    )
