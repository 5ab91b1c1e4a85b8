"""The comparison as titled tables of text, and as one HTML file with the loss curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlmpack.evaluation.metrics import written_metrics
from vlmpack.report.compare.comparison import (
    MAX_ROWS,
    ComparedRun,
    Comparison,
    Difference,
    cautions,
    identity_differences,
    machine_differences,
    mean_loss,
    model_differences,
    recipe_differences,
    relative,
)
from vlmpack.report.document import (
    BLUE,
    MUTED,
    NARROW_INCHES,
    ORANGE,
    SMALL,
    WIDTH_INCHES,
    Picture,
    figure,
    one_line,
    percent,
    render,
    shorten,
    svg,
)
from vlmpack.report.forecast import Section
from vlmpack.report.run_pictures import draw_curve, smooth
from vlmpack.training.metrics import validations
from vlmpack.whole_file import write_atomically
from vlmpack.words import counted, duration

MAX_VALUE = 400
"""Characters of a value in a table."""


def sections(comparison: Comparison) -> tuple[Section, ...]:
    return (
        Section(
            title="Runs",
            lines=(*_runs(comparison), *verdict(comparison), *cautions(comparison.a, comparison.b)),
        ),
        _figures(comparison.a, comparison.b),
        _by_samples(comparison),
        *_differences(comparison),
    )


def verdict(comparison: Comparison) -> list[str]:
    """In sentences: whether the losses may be compared, and where they part."""
    if comparison.reasons:
        return [f"NOT COMPARABLE: {reason}" for reason in comparison.reasons]
    same, common = comparison.same, comparison.a.losses.keys() & comparison.b.losses.keys()
    how = "by the records of samples" if same.is_recorded else (
        "going by their counts of samples and tokens, since a record of samples is missing"
    )  # fmt: skip
    steps = counted(len(common), "step")
    if not same.steps:
        lines = [
            f"none of {steps} of both trained the same samples ({how}): losses are compared by the "
            "samples that each run has seen"
        ]
    elif same.first_other is None:
        lines = [f"the same samples in each of {steps} of both, {how}"]
    else:
        lines = [
            f"the same samples in {len(same.steps):,} of {steps} of both ({how}); step "
            f"{same.first_other:,} is the first with others"
        ]
    return [*lines, *_parted(comparison)]


def _parted(comparison: Comparison) -> list[str]:
    parted = comparison.parted
    if parted is None:
        return []
    step, one, other = parted.largest
    bound = f"{parted.noise:.0e} is taken for noise; --noise"
    if parted.first is None:
        if one == other:
            return ["over those steps every loss is the same to the last digit"]
        return [
            f"over those steps losses differ by float noise alone: at most "
            f"{relative(one, other):.1e} of the loss, at step {step:,} ({bound})"
        ]
    at, a, b = parted.first
    return [
        f"losses part at step {at:,}: {a:.6g} and {b:.6g}, {relative(a, b):.1e} of the loss; "
        f"before it at most {parted.within:.1e} ({bound})",
        f"they differ most at step {step:,}: {one:.6g} and {other:.6g}, "
        f"{relative(one, other):.1e} of the loss",
    ]


def _runs(comparison: Comparison) -> list[str]:
    return [f"{run.label}  {run.path}" for run in (comparison.a, comparison.b)]


def _figures(a: ComparedRun, b: ComparedRun) -> Section:
    sides = _final(a), _final(b)
    names = list(dict.fromkeys(name for side in sides for name in side))
    rows = ((name, *(side.get(name, "") for side in sides)) for name in names)
    return Section.of_figures("Final figures", ("", "A", "B"), rows)


def _final(run: ComparedRun) -> dict[str, str]:
    """Figures of one run by name, as text; what it lacks is left out."""
    steps = list(run.losses.values())
    last = [one for one in steps if one.samples > 0.9 * steps[-1].samples]
    facts = {
        "steps": f"{steps[-1].step:,}",
        "samples seen": f"{steps[-1].samples:,}",
        "real tokens seen": f"{steps[-1].tokens:,}",
        "loss of the last tenth": f"{mean_loss(last) or steps[-1].loss:.4g}",
    }
    number = run.files.number
    if (padded := number("padded_tokens")) and (computed := number("computed_tokens")) is not None:
        facts["slots saved by packing"] = percent(1 - computed / padded)
    if (real := number("real_tokens")) is not None and (slots := number("computed_tokens")):
        facts["padding"] = percent(1 - real / slots)
    if (speed := number("tokens_per_second")) is not None:
        facts["real tokens per second"] = f"{speed:,.0f}"
    if (seconds := number("train_seconds")) is not None:
        facts["training time"] = duration(seconds)
    for row in validations([*run.files.steps.values()])[-1:]:
        facts |= {
            f"validation {name.replace('_', ' ')}, last": f"{value:.4g}"
            for name, value in row.items()
            if name not in ("step", "label_tokens") and isinstance(value, int | float)
        }
    for when in ("before", "after"):
        for name, share in written_metrics(run.files.result, when).items():
            facts[f"{name.replace('_', ' ')} {when} training"] = percent(share)
    return facts


def _by_samples(comparison: Comparison) -> Section:
    rows = []
    for window in comparison.windows:
        one, other = window.losses
        both = one is not None and other is not None and not comparison.reasons
        rows.append(
            (
                f"{window.samples:,}",
                *(f"{tokens:,}" for tokens in window.tokens),
                *("" if loss is None else f"{loss:.5g}" for loss in window.losses),
                *([f"{(other or 0.0) - (one or 0.0):+.2g}"] if both else [""]),
            )
        )
    return Section.of_figures(
        "Loss by samples seen",
        ("samples\nseen", "tokens\nA", "tokens\nB", "loss\nA", "loss\nB", "B - A"),
        rows,
        "mean over the steps that end since the line above; up to the end of the shorter run",
        words=0,
    )


def _differences(comparison: Comparison) -> list[Section]:
    a, b = comparison.a, comparison.b
    made = [
        _table("What differs in what is learned (identity.json)", identity_differences(a, b)),
        _table("What else differs in the recipe", recipe_differences(a, b)),
        _table("What differs in the model folder (model.json)", model_differences(a, b)),
        _table("What differs in what computed", machine_differences(a, b)),
    ]
    if any(section.rows for section in made):
        return [section for section in made if section.rows]
    return [Section(title="What differs", lines=("nothing that the run folders say",))]


def _table(title: str, rows: Sequence[Difference]) -> Section:
    more = len(rows) - MAX_ROWS
    shown = (
        (one_line(name), *(shorten(one_line(text), MAX_VALUE) for text in values))
        for name, *values in rows[:MAX_ROWS]
    )
    said = [f"{more:,} more"] if more > 0 else []
    return Section.of_figures(title, ("key", "A", "B"), shown, *said, words=3)


COLORS = (BLUE, ORANGE)


def write_page(comparison: Comparison, path: Path) -> None:
    """Draw the curves and write the page.

    Raises:
        CapabilityError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    write_atomically(path, render_page(comparison))


def render_page(comparison: Comparison) -> str:
    runs, *tables = sections(comparison)
    return render(
        "compare.html",
        title=f"{comparison.a.files.name} and {comparison.b.files.name}",
        runs=[f"{run.label}: {run.path}" for run in (comparison.a, comparison.b)],
        verdict=verdict(comparison),
        is_comparable=not comparison.reasons,
        lines=[line for line in runs.lines[2:] if line not in verdict(comparison)],
        figures=(),
        pictures=[draw(comparison)],
        sections=tables,
    )


def draw(comparison: Comparison) -> Picture:
    """Both losses over the samples seen, and, where steps trained the same, how far they part."""
    units = [run.files.unit for run in (comparison.a, comparison.b)]
    per = ["" if units[0] == units[1] else f" (per {unit})" for unit in units]
    caption = f"Loss by samples seen, smoothed: A in blue{per[0]}, B in orange{per[1]}"
    if comparison.parted is not None:
        caption += "; below, the difference at steps of the same samples, relative to the loss"
    made = []
    for name, width, height in (("narrow", NARROW_INCHES, 3.4), ("wide", WIDTH_INCHES, 4.4)):
        with figure(height, width) as drawing:
            _draw(drawing, comparison, left=0.75 / width, right=1 - 0.1 / width)
            made.append(svg(drawing, f"compared-{name}", caption))
    return Picture("Loss", caption, *made)


def _draw(drawing: Any, comparison: Comparison, *, left: float, right: float) -> None:
    heights = (3, 1.2) if comparison.parted is not None else (1,)
    grid = drawing.add_gridspec(
        len(heights), 1, height_ratios=heights, hspace=0.35, left=left, right=right, top=0.92,
        bottom=0.14,
    )  # fmt: skip
    top = drawing.add_subplot(grid[0])
    for run, color, style in zip(
        (comparison.a, comparison.b), COLORS, ("-", (0, (4, 2))), strict=True
    ):
        _curve(top, run, color, style)
    for place, side, run, color in zip(
        (0.0, 1.0), ("left", "right"), (comparison.a, comparison.b), COLORS, strict=True
    ):
        last = [*run.losses.values()][-1].loss
        top.text(
            place, 1.03, f"{run.label} {last:.4g}", transform=top.transAxes, color=color, ha=side,
            va="bottom", fontsize=SMALL,
        )  # fmt: skip
    top.grid(axis="y")
    units = {run.files.unit for run in (comparison.a, comparison.b)}
    top.set_ylabel(
        f"loss per {comparison.a.files.unit}" if len(units) == 1 else "loss, in two units"
    )
    bottom = top
    if comparison.parted is not None:
        bottom = drawing.add_subplot(grid[1], sharex=top)
        _draw_differences(bottom, comparison, comparison.parted.noise)
        top.tick_params(labelbottom=False, bottom=False)
    bottom.set_xlabel("samples seen")
    bottom.xaxis.get_major_locator().set_params(integer=True, nbins=5)
    bottom.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _curve(axes: Any, run: ComparedRun, color: str, style: Any) -> None:
    steps = [*run.losses.values()]
    losses = smooth([one.loss for one in steps], max(1, len(steps) // 40))
    samples = [one.samples for one in steps]
    draw_curve(axes, samples, losses, color=color, linestyle=style, linewidth=1.6, markersize=5)


def _draw_differences(axes: Any, comparison: Comparison, noise: float) -> None:
    """On a logarithmic scale; equal losses lie on its lower edge."""
    a, b = comparison.a.losses, comparison.b.losses
    places = [a[step].samples for step in comparison.same.steps]
    values = [relative(a[step].loss, b[step].loss) for step in comparison.same.steps]
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
