"""The comparison as titled tables of text, in the order of the page."""

from __future__ import annotations

from collections.abc import Sequence

from vlmpack.evaluation.metrics import written_metrics
from vlmpack.report.compare.align import mean_loss, relative
from vlmpack.report.compare.comparison import Comparison
from vlmpack.report.compare.differences import (
    MAX_ROWS,
    Difference,
    cautions,
    identity_differences,
    machine_differences,
    model_differences,
    recipe_differences,
)
from vlmpack.report.compare.read import ComparedRun
from vlmpack.report.forecast import Column, Section
from vlmpack.report.style import one_line, percent, shorten
from vlmpack.training.metrics import validations
from vlmpack.words import counted, duration

MAX_VALUE = 400
"""Characters of a value in a table."""


def sections(found: Comparison) -> tuple[Section, ...]:
    """All of them."""
    return (
        Section(title="Runs", lines=(*_runs(found), *verdict(found), *cautions(found.a, found.b))),
        _figures(found.a, found.b),
        _by_samples(found),
        *_differences(found),
    )


def verdict(found: Comparison) -> list[str]:
    """In sentences: whether the losses may be compared, and where they part."""
    if found.reasons:
        return [f"NOT COMPARABLE: {reason}" for reason in found.reasons]
    same, common = found.same, found.a.losses.keys() & found.b.losses.keys()
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
    return [*lines, *_parted(found)]


def _parted(found: Comparison) -> list[str]:
    parted = found.parted
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


def _runs(found: Comparison) -> list[str]:
    return [f"{run.label}  {run.path}" for run in (found.a, found.b)]


def _figures(a: ComparedRun, b: ComparedRun) -> Section:
    sides = _final(a), _final(b)
    names = list(dict.fromkeys(name for side in sides for name in side))
    return Section(
        title="Final figures",
        columns=(Column("", is_text=True), Column("A"), Column("B")),
        rows=tuple((name, *(side.get(name, "") for side in sides)) for name in names),
    )


def _final(run: ComparedRun) -> dict[str, str]:
    """Figures of one run by name, as text; what it lacks is left out."""
    steps = list(run.losses.values())
    last = [one for one in steps if one.samples > 0.9 * steps[-1].samples]
    found = {
        "steps": f"{steps[-1].step:,}",
        "samples seen": f"{steps[-1].samples:,}",
        "real tokens seen": f"{steps[-1].tokens:,}",
        "loss of the last tenth": f"{mean_loss(last) or steps[-1].loss:.4g}",
    }
    number = run.files.number
    if (padded := number("padded_tokens")) and (computed := number("computed_tokens")) is not None:
        found["slots saved by packing"] = percent(1 - computed / padded)
    if (real := number("real_tokens")) is not None and (slots := number("computed_tokens")):
        found["padding"] = percent(1 - real / slots)
    if (speed := number("tokens_per_second")) is not None:
        found["real tokens per second"] = f"{speed:,.0f}"
    if (seconds := number("train_seconds")) is not None:
        found["training time"] = duration(seconds)
    for row in validations([*run.files.steps.values()])[-1:]:
        found |= {
            f"validation {name.replace('_', ' ')}, last": f"{value:.4g}"
            for name, value in row.items()
            if name not in ("step", "label_tokens") and isinstance(value, int | float)
        }
    for when in ("before", "after"):
        for name, share in written_metrics(run.files.result, when).items():
            found[f"{name.replace('_', ' ')} {when} training"] = percent(share)
    return found


def _by_samples(found: Comparison) -> Section:
    rows = []
    for window in found.windows:
        one, other = window.losses
        both = one is not None and other is not None and not found.reasons
        rows.append(
            (
                f"{window.samples:,}",
                *(f"{tokens:,}" for tokens in window.tokens),
                *("" if loss is None else f"{loss:.5g}" for loss in window.losses),
                *([f"{(other or 0.0) - (one or 0.0):+.2g}"] if both else [""]),
            )
        )
    return Section(
        title="Loss by samples seen",
        columns=tuple(
            map(Column, ("samples\nseen", "tokens\nA", "tokens\nB", "loss\nA", "loss\nB", "B - A"))
        ),
        rows=tuple(rows),
        lines=(
            "mean over the steps that end since the line above; up to the end of the shorter run",
        ),
    )


def _differences(found: Comparison) -> list[Section]:
    a, b = found.a, found.b
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
    return Section(
        title=title,
        columns=tuple(Column(name, is_text=True) for name in ("key", "A", "B")),
        rows=tuple(
            (one_line(name), *(shorten(one_line(text), MAX_VALUE) for text in values))
            for name, *values in rows[:MAX_ROWS]
        ),
        lines=(f"{more:,} more",) if more > 0 else (),
    )
