"""lengths.png, and its halves in the page: how long the samples are, and one micro-batch drawn to
scale, padded and packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmpack.report.picture import Picture
from vlmpack.report.run_files import DataSummary, RunFiles
from vlmpack.report.style import (
    BLUE,
    FAINT,
    INK,
    LARGE,
    MUTED,
    NARROW_INCHES,
    NORMAL,
    PADDING,
    SEGMENTS,
    SMALL,
    figure,
    percent,
    png,
    svg,
)
from vlmpack.words import counted

HEIGHT_INCHES = 4.3
NARROW_HEIGHT = 3.0
NUM_BARS = 36
PERCENTILES = ((0.05, "5%"), (0.5, "half"), (0.95, "95%"))
MAX_ROWS_DRAWN = 24
"""Micro-batches of more samples are drawn in part: thinner rows could not be told apart."""


def draw_lengths(run: RunFiles) -> bytes | None:
    """The picture; None where the run has no data summary or no lengths."""
    data = run.data
    if data is None or not data.lengths:
        return None
    with figure(HEIGHT_INCHES) as drawing:
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
    wanted = share * sum(lengths.values())
    seen = 0
    for length in sorted(lengths):
        seen += lengths[length]
        if seen >= wanted:
            return length
    raise ValueError("no lengths")


def typical_batch(data: DataSummary) -> tuple[int, ...]:
    """The example whose share of padding is nearest to the whole run's."""
    wanted = 1 - data.real_tokens / data.padded_tokens if data.padded_tokens else 0.0

    def distance(batch: tuple[int, ...]) -> float:
        return abs(1 - sum(batch) / (len(batch) * max(batch)) - wanted)

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
