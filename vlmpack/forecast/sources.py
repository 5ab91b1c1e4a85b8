"""The samples of a plan, by source and by row.

CUDA graphs need a `cu_seqlens` of one size, so the samples of a row are bounded. Either the packer
keeps the bound and makes more rows, or rows above it run without a graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise

import numpy as np

from vlmpack.alignment import round_up
from vlmpack.data.index.table import Fitted, Int64s, SampleLimits
from vlmpack.data.modes import Online, PackingMode
from vlmpack.data.plan.packers import Bin, BudgetPacker
from vlmpack.data.splits.summary import Totals
from vlmpack.forecast.figures import (
    PERCENTILES,
    BoundChoice,
    LeftOut,
    SequenceFigures,
    SourceFigures,
)
from vlmpack.forecast.modes import PlannedMode

NUM_BARS = 40
MAX_LISTED = 20
"""Samples that are listed with their reasons."""


def source_figures(
    fitted: Fitted, names: Sequence[str], drawn: Sequence[int], limits: SampleLimits
) -> tuple[tuple[SourceFigures, ...], SourceFigures]:
    """The figures of each source, and of all together.

    Args:
        drawn: draws from each in an epoch.
    """
    edges = fitted.table.source_starts.tolist()
    whole = (0, fitted.table.num_samples)
    totals = [Totals.of((fitted.table, span) for span in fitted.good(*e)) for e in pairwise(edges)]
    total = Totals.of((fitted.table, span) for span in fitted.good())
    longest = total.by_tokens.size - 1
    figures = [
        _figures(fitted, (edges[d], edges[d + 1]), totals[d], name, drawn[d], limits, longest)
        for d, name in enumerate(names)
    ]
    return tuple(figures), _figures(fitted, whole, total, "total", sum(drawn), limits, longest)


def _figures(
    fitted: Fitted,
    numbers: tuple[int, int],
    totals: Totals,
    name: str,
    drawn: int,
    limits: SampleLimits,
    longest: int,
) -> SourceFigures:
    table, (start, stop) = fitted.table, numbers
    dropped = np.asarray([d.number for d in fitted.dropped if start <= d.number < stop], np.int64)
    too_long = int((table.num_tokens[dropped] > limits.seq_length).sum())
    by_limit = zip(limits.in_words, (too_long, dropped.size - too_long), strict=True)
    bad = Counter(kind for n, (kind, _) in table.faults.items() if start <= n < stop)
    return SourceFigures(
        name=name,
        num_samples=int(fitted.eligible[start:stop].sum()) + dropped.size,
        num_usable=totals.num_samples,
        num_drawn=drawn,
        num_dropped={reason: count for reason, count in by_limit if count},
        num_shrunk=sum(start <= number < stop for number in table.shrunk),
        num_bad=dict(sorted(bad.items())),
        num_tokens=totals.num_tokens,
        num_image_tokens=totals.num_image_tokens,
        num_label_tokens=totals.num_label_tokens,
        num_patches=totals.num_patches,
        length_percentiles=totals.percentiles(PERCENTILES),
        length_histogram=histogram(totals.by_tokens, longest),
    )


def histogram(by_tokens: Int64s, longest: int) -> tuple[tuple[int, int], ...]:
    """(upper edge, samples) of equal bins from 0 to at least `longest` tokens.

    Args:
        by_tokens: (n,) samples of each length in tokens.
    """
    width = max(1, -(-longest // NUM_BARS))
    bars = (np.maximum(np.arange(by_tokens.size), 1) - 1) // width
    counts = np.bincount(bars, by_tokens, minlength=-(-longest // width)).astype(np.int64)
    return tuple(((i + 1) * width, count) for i, count in enumerate(counts.tolist()))


def left_out(fitted: Fitted) -> tuple[LeftOut, ...]:
    """The first samples that are not trained: the over-long ones, then the bad ones."""
    table = fitted.table
    reasons = [(one.number, one.reason) for one in fitted.dropped[:MAX_LISTED]]
    faults = sorted(islice(table.faults.items(), MAX_LISTED))
    reasons += [(number, f"{kind}: {reason}") for number, (kind, reason) in faults]
    return tuple(
        LeftOut(
            key=table.key(number),
            shard=table.shards[table.shard_of(number)].path,
            reason=reason,
        )
        for number, reason in reasons[:MAX_LISTED]
    )


NAMED = (("p50", 50.0), ("p90", 90.0), ("p99", 99.0), ("p99.9", 99.9), ("max", 100.0))
"""Percentiles of the samples in a row."""

BOUND_MULTIPLE = 8

COST_SAMPLES = 16_384

BOUNDARY_BYTES = 4
"""Bytes of an entry of `cu_seqlens`, int32; a row has two more than samples."""


def sequence_figures(
    mode: PlannedMode, tokens: Int64s, patches: Int64s, *, fixed: bool = True
) -> SequenceFigures:
    """The samples in a row of a mode's epoch, and the choices of a bound.

    Args:
        tokens, patches: (n,) of the dry run's samples, in the order of the run.
        fixed: whether its rows may have a fixed shape; else there is nothing to choose.
    """
    bins = mode.layout.bins
    counts = np.bincount(bins) if bins.size else np.zeros(1, np.int64)
    used = np.flatnonzero(counts)
    return SequenceFigures(
        mode=mode.name,
        mean=float(bins.mean()) if bins.size else 0.0,
        percentiles=_percentiles(bins),
        histogram=tuple(zip(used.tolist(), counts[used].tolist(), strict=True)),
        bound_by=_bound_by(mode),
        waiting=mode.mode.waiting(tokens),
        dry_run_samples=int(tokens.size),
        choices=bound_choices(mode.mode, tokens, patches) if fixed else (),
    )


def _bound_by(mode: PlannedMode) -> dict[str, float]:
    budget, layout = mode.mode.budget, mode.layout
    if not layout.bins.size:
        return {}
    held = layout.by_bin(budget.planned(layout.sequences)) if mode.held is None else mode.held.slots
    num_images = int(np.count_nonzero(layout.patches))
    return budget.ends(held, mode.image_sums(layout.patches), layout.bins, num_images)


def bound_choices(mode: PackingMode, tokens: Int64s, patches: Int64s) -> tuple[BoundChoice, ...]:
    """The coverage and cost of each bound, by dry runs with and without it.

    Args:
        mode: its rows are counted, those of `online` where it plans none. The bound of its budget
            is marked.
        tokens, patches: (n,) of the samples; the cost is taken from the first COST_SAMPLES.
    """
    budget = mode.budget
    packer = mode.packer if isinstance(mode, Online) else BudgetPacker

    def rows_of(count: int, bound: int | None) -> list[Bin]:
        return packer(
            budget=replace(budget, max_sequences=bound),
            global_batch_size=count,
            scope="stream",
            sizes=lambda places: (tokens[places], patches[places]),
        ).rows(np.arange(count))

    free_rows = rows_of(tokens.size, None)
    if not free_rows:
        return ()
    free = np.fromiter(map(len, free_rows), np.int64, len(free_rows))
    held = np.array([tokens[[*row]].sum() for row in free_rows], np.int64)
    bounds: dict[int, str] = {}
    for name, size in _percentiles(free).items():
        bound = round_up(size, BOUND_MULTIPLE)
        bounds[bound] = f"{bounds[bound]}, {name}" if bound in bounds else name
    own = budget.max_sequences
    if own is not None and own not in bounds:
        bounds[own] = "recipe"
    some = min(COST_SAMPLES, tokens.size)
    sizes = np.array([len(row) for row in rows_of(some, None)])
    choices = []
    for bound, basis in sorted(bounds.items()):
        extra = 0.0
        if (sizes > bound).any():
            extra = len(rows_of(some, bound)) / sizes.size - 1
        choices.append(
            BoundChoice(
                basis=basis,
                max_sequences=bound,
                covered=float((free <= bound).mean()),
                extra_rows=extra,
                tails=budget.tails(held[free <= bound], int(held[free > bound].sum())),
                boundary_bytes=BOUNDARY_BYTES * (bound + 2),
                is_recipes=bound == own,
            )
        )
    return tuple(choices)


def _percentiles(sizes: Int64s) -> dict[str, int]:
    if not sizes.size:
        return {name: 0 for name, _ in NAMED}
    values = np.percentile(sizes, [share for _, share in NAMED], method="higher").tolist()
    return {name: int(value) for (name, _), value in zip(NAMED, values, strict=True)}
