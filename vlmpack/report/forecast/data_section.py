"""What a run trains on, source by source."""

from __future__ import annotations

from vlmpack.forecast.figures import RunPlan, SourceFigures
from vlmpack.report.forecast.numbers import compact, share
from vlmpack.report.forecast.section import Column, Section
from vlmpack.report.style import one_line
from vlmpack.words import counted


def data_section(plan: RunPlan, max_sources: int) -> Section:
    """The sources, what is left out, and what weights make of it.

    Args:
        max_sources: with a row of their own.
    """
    shown = list(plan.sources[:max_sources])
    # Without weights and data.epoch_size, an epoch draws each usable sample and known hole once.
    drawn = None
    if any(one.num_drawn != one.num_usable + sum(one.num_bad.values()) for one in plan.sources):
        drawn = sum(_drawn_tokens(one) for one in plan.sources)
    rows = [_source(source, one_line(source.name), drawn) for source in shown]
    if len(plan.sources) > 1:
        rows.append(_source(plan.total, "total", drawn, all_tokens=drawn))
    lines = [f"loss, vision: shares of the tokens; p5 to max: tokens of a {plan.unit}"]
    if drawn is not None:
        lines.append(
            f"drawn: {plan.units} of an epoch, by the weights; share: of the tokens of an epoch"
        )
    lines += [
        f"{count:,} more sources are in the page (--html) and in the JSON"
        for count in [len(plan.sources) - len(shown)]
        if count
    ]
    if plan.total.num_shrunk:
        shrunk = counted(plan.total.num_shrunk, plan.unit)
        lines.append(f"{shrunk} with images made smaller to fit")
    for reason, count in plan.total.num_dropped.items():
        lines.append(f"{counted(count, plan.unit)} dropped: {reason}")
    for kind, count in plan.total.num_bad.items():
        lines.append(f"{counted(count, plan.unit)} bad ({kind}): skipped as holes")
    if plan.left_out:
        first = plan.left_out[0]
        lines.append(f"the first of them: {one_line(first.key)} in {first.shard}: {first.reason}")
    elif not plan.total.num_shrunk:
        lines.append("nothing is dropped, shrunk or known to be bad")
    return Section(
        title="Data",
        columns=(
            Column("source", is_text=True),
            Column(plan.units),
            Column("usable"),
            *((Column("drawn"), Column("share")) if drawn is not None else ()),
            *map(Column, ("tokens", "loss", "vision", "p5", "p50", "p95", "p99", "max")),
        ),
        rows=tuple(rows),
        lines=tuple(lines),
    )


def _source(
    source: SourceFigures, name: str, drawn: float | None, *, all_tokens: float | None = None
) -> tuple[str, ...]:
    """A row. `drawn`: tokens of an epoch, where that is not each sample once; `all_tokens`: those
    of this row, where they are known better than by its mean sample."""
    lengths = source.length_percentiles
    epoch: tuple[str, ...] = ()
    if drawn is not None:
        part = _drawn_tokens(source) if all_tokens is None else all_tokens
        epoch = (compact(source.num_drawn), share(part / max(1.0, drawn), 0))
    return (
        name,
        compact(source.num_samples),
        compact(source.num_usable),
        *epoch,
        compact(source.num_tokens),
        share(source.label_share, 0),
        share(source.vision_share, 0),
        *(compact(lengths[p]) if lengths else "" for p in (5, 50, 95, 99, 100)),
    )


def _drawn_tokens(source: SourceFigures) -> float:
    """Tokens of an epoch: as many samples of the source's mean length as are drawn from it,
    the known holes among them counted as such."""
    return source.num_drawn * source.num_tokens / max(1, source.num_usable)
