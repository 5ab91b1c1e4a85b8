"""The plan as one HTML file, with pictures and tables, and as JSON.

Each picture is narrow enough for a telephone. A wide page shows two side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from vlmpack.file_format import PLAN
from vlmpack.forecast.figures import RunPlan, SourceFigures
from vlmpack.report.document import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    NARROW_INCHES,
    ORANGE,
    PADDING,
    PALE_BLUE,
    SMALL,
    Picture,
    Section,
    compact,
    figure,
    one_line,
    render,
    share,
    shorten,
    svg,
)
from vlmpack.report.forecast.sections import sections
from vlmpack.whole_file import write_atomically
from vlmpack.words import counted

HEIGHT_INCHES = 2.9
LEGEND_INCHES = 0.2
"""A line of the legend above the bars."""
LABEL_POINTS = 13
"""Labels of neighbouring bounds are at least so far apart; the table has them all."""
COLORS = (BLUE, ORANGE, GREEN, PALE_BLUE)
MAX_COLORED = 4
"""Sources with a colour; the last one stands for all others where there are more."""


def draw_pictures(plan: RunPlan) -> list[Picture]:
    """All that the plan has figures for.

    Raises:
        CapabilityError: matplotlib is not installed.
    """
    own = plan.mode
    drawn = [
        _picture(
            f"How long the {plan.units} are",
            f"Usable {plan.units} by their tokens, image tokens included"
            + (", stacked by source" if len(plan.sources) > 1 else ""),
            lambda axes: _lengths(axes, plan.sources),
            top=LEGEND_INCHES * ((min(len(plan.sources), MAX_COLORED) + 1) // 2)
            if len(plan.sources) > 1
            else 0.0,
        ),
        _picture(
            "What is computed",
            "Slots of one epoch: real tokens in blue, padding in grey. The recipe's mode, "
            f"{own.name}, is in bold",
            lambda axes: _modes(axes, plan),
            left=1.15,
        ),
        _picture(
            f"{plan.units.capitalize()} in a row",
            f"Rows of {plan.sequences.mode} by the {plan.units} they hold"
            + (
                "; dashed: bounds for CUDA graphs, with the share of rows below them"
                if plan.sequences.choices
                else ""
            ),
            lambda axes: _sequences(axes, plan),
        ),
    ]
    if plan.imbalance:
        drawn.append(
            _picture(
                "How long a step waits",
                "Cost of the slowest rank above the mean, by the number of ranks: rows dealt in "
                "turn, and by cost",
                lambda axes: _imbalance(axes, plan),
                top=LEGEND_INCHES,
            )
        )
    return drawn


def _picture(
    title: str,
    caption: str,
    draw: Callable[[Any], None],
    *,
    left: float = 0.62,
    top: float = 0.0,
) -> Picture:
    """A drawing of one pair of axes, `left` and `top` inches from its edges."""
    with figure(HEIGHT_INCHES, NARROW_INCHES) as drawing:
        wide, high = NARROW_INCHES - left - 0.14, HEIGHT_INCHES - top - 0.64
        box = (left / NARROW_INCHES, 0.52 / HEIGHT_INCHES, wide / NARROW_INCHES)
        draw(drawing.add_axes((*box, high / HEIGHT_INCHES)))
        name = "".join(c if c.isalnum() else "-" for c in title.lower())
        return Picture(title, caption, svg(drawing, name, caption))


def _lengths(axes: Any, sources: Sequence[SourceFigures]) -> None:
    groups = [(one_line(source.name), source.length_histogram) for source in sources]
    if len(groups) > MAX_COLORED:
        others = groups[MAX_COLORED - 1 :]
        merged = tuple(
            (columns[0][0], sum(count for _, count in columns))
            for columns in zip(*(bars for _, bars in others), strict=True)
        )
        groups = [*groups[: MAX_COLORED - 1], (f"{len(others)} others", merged)]
    bottoms = [0] * len(groups[0][1])
    for color, (name, bars) in zip(COLORS, groups, strict=False):
        if not bars:
            continue
        width, counts = bars[0][0], [count for _, count in bars]
        axes.bar(
            [edge - width for edge, _ in bars], counts, bottom=bottoms, width=0.9 * width,
            align="edge", color=color, linewidth=0, label=shorten(name, 18),
        )  # fmt: skip
        bottoms = [low + count for low, count in zip(bottoms, counts, strict=True)]
    if len(groups) > 1:
        _legend(axes, ncols=2)
    axes.set_xlabel("tokens")
    _count_axis(axes.yaxis)
    _count_axis(axes.xaxis)
    axes.grid(axis="y")
    axes.set_xlim(left=0)


def _modes(axes: Any, plan: RunPlan) -> None:
    most = max(mode.slots for mode in plan.modes)
    for place, mode in enumerate(plan.modes):
        axes.barh(-place, mode.slots, height=0.46, color=PADDING, linewidth=0)
        axes.barh(-place, mode.held_tokens, height=0.46, color=BLUE, linewidth=0)
        axes.text(
            0, 0.26 - place, f"{share(mode.padding)} padding, {mode.steps:,} steps",
            va="bottom", fontsize=SMALL, color=INK,
        )  # fmt: skip
    axes.set_ylim(0.35 - len(plan.modes), 0.65)
    axes.set_yticks(
        [-place for place in range(len(plan.modes))], [mode.name for mode in plan.modes]
    )
    for label, mode in zip(axes.get_yticklabels(), plan.modes, strict=True):
        label.set_color(INK)
        label.set_weight("bold" if mode.is_recipes else "normal")
    axes.set_xlim(0, 1.02 * most)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("slots of an epoch")
    _count_axis(axes.xaxis)


def _sequences(axes: Any, plan: RunPlan) -> None:
    figures = plan.sequences
    axes.bar(
        [size for size, _ in figures.histogram], [rows for _, rows in figures.histogram],
        width=0.9, color=BLUE, linewidth=0,
    )  # fmt: skip
    top = max((rows for _, rows in figures.histogram), default=1)
    axes.set_ylim(0, 1.5 * top)  # room for what the bounds say
    last = max([*(size for size, _ in figures.histogram), 1])
    for choice in figures.choices:
        last = max(last, choice.max_sequences)
    labelled: list[int] = []
    points = 72 * (NARROW_INCHES - 0.76) / (1.03 * last + 0.5)
    for choice in sorted(figures.choices, key=lambda choice: not choice.is_recipes):
        color = INK if choice.is_recipes else MUTED
        axes.axvline(choice.max_sequences + 0.5, color=color, linewidth=1, linestyle=(0, (3, 3)))
        if any(abs(choice.max_sequences - one) * points < LABEL_POINTS for one in labelled):
            continue
        labelled.append(choice.max_sequences)
        axes.annotate(
            f"{choice.max_sequences}: {share(choice.covered)}", (choice.max_sequences + 0.5, 1.0),
            xycoords=axes.get_xaxis_transform(), xytext=(-3, -2), textcoords="offset points",
            ha="right", va="top", rotation=90, fontsize=SMALL, color=color,
        )  # fmt: skip
    axes.set_xlim(0, 1.03 * last + 0.5)
    axes.set_xlabel(f"{plan.units} in a row")
    axes.set_ylabel("rows")
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=8)
    _count_axis(axes.yaxis)


def _imbalance(axes: Any, plan: RunPlan) -> None:
    places = range(len(plan.imbalance))
    for offset, color, name, values in (
        (-0.2, PALE_BLUE, "in turn", [one.total_dealt for one in plan.imbalance]),
        (0.2, BLUE, "by cost", [one.total_balanced for one in plan.imbalance]),
    ):
        over = [100 * (value - 1) for value in values]
        axes.barh(
            [place + offset for place in places], over, height=0.36, color=color, linewidth=0,
            label=name,
        )  # fmt: skip
        for place, value in zip(places, over, strict=True):
            axes.annotate(
                f"{value:.1f}%", (value, place + offset), xytext=(3, 0),
                textcoords="offset points", ha="left", va="center_baseline", fontsize=SMALL,
                color=INK,
            )  # fmt: skip
    axes.set_yticks(list(places), [f"{one.data_parallel}" for one in plan.imbalance])
    for label, one in zip(axes.get_yticklabels(), plan.imbalance, strict=True):
        label.set_weight("bold" if one.is_recipes else "normal")
    axes.set_ylim(len(plan.imbalance) - 0.5, -0.5)
    axes.set_ylabel("data-parallel ranks")
    axes.set_xlabel("slowest rank above the mean")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    axes.xaxis.get_major_locator().set_params(nbins=5)
    most = max(max(one.total_dealt, one.total_balanced) for one in plan.imbalance)
    axes.set_xlim(0, 1.25 * max(100 * (most - 1), 0.1))  # room for the figures at the bars' ends
    _legend(axes, ncols=2)
    axes.grid(axis="x")


def _legend(axes: Any, *, ncols: int) -> None:
    axes.legend(
        frameon=False, fontsize=SMALL, loc="lower left", bbox_to_anchor=(0, 1), ncols=ncols,
        borderaxespad=0, borderpad=0.1, handlelength=1.1, columnspacing=1.2, labelspacing=0.3,
    )  # fmt: skip


def _count_axis(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _: compact(value))
    axis.get_major_locator().set_params(integer=True, nbins=5)


MAX_SOURCES = 1000


def write_page(plan: RunPlan, path: Path, *, title: str) -> None:
    """Draw the pictures and write the page.

    Raises:
        CapabilityError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    write_atomically(path, render_page(plan, draw_pictures(plan), title=title))


def render_page(plan: RunPlan, pictures: list[Picture], *, title: str) -> str:
    mode, none = plan.mode, plan.modes[0]
    samples = f"{compact(plan.total.num_tokens)} tokens"
    return render(
        "plan.html",
        title=title,
        about=f"plan of {plan.model}, packing.mode {mode.name}, "
        f"{counted(plan.world_size, 'process', 'processes')}",
        figures=[
            (plan.units, compact(plan.total.num_usable), samples),
            ("steps", f"{plan.run_steps:,}", f"{plan.steps_per_epoch:,} an epoch"),
            ("padding", share(mode.padding), f"{share(none.padding)} unpacked"),
            (
                f"{plan.units} a step",
                compact(plan.batch.samples),
                f"{compact(plan.batch.tokens)} tokens",
            ),
        ],
        pictures=pictures,
        sections=[*sections(plan, max_sources=MAX_SOURCES), *_left_out(plan)],
    )


def _left_out(plan: RunPlan) -> list[Section]:
    if not plan.left_out:
        return []
    title = f"Not trained, the first {len(plan.left_out)}"
    rows = ((one.key, one.shard, one.reason) for one in plan.left_out)
    return [Section.of_figures(title, ("key", "shard", "why"), rows, words=3)]


def as_json(plan: RunPlan) -> dict[str, Any]:
    """The plan, by the names of `vlmpack.forecast.figures`."""
    content: dict[str, Any] = _value(plan)
    content.pop("mode")  # one of the modes, by is_recipes
    return PLAN.mark(content)


def _value(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        names += [name for name, kind in vars(type(value)).items() if isinstance(kind, property)]
        return {name: _value(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(name): _value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_value(item) for item in value]
    return value
