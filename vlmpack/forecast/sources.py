"""What each source holds, and what of it is not trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

import numpy as np

from vlmpack.data.index.overlong import Fitted, SampleLimits
from vlmpack.data.index.table import Int64s
from vlmpack.forecast.figures import PERCENTILES, LeftOut, SourceFigures

NUM_BARS = 40
MAX_LISTED = 20
"""Samples that are listed with their reasons."""


def source_figures(
    fitted: Fitted, names: Sequence[str], drawn: Sequence[int], limits: SampleLimits
) -> tuple[tuple[SourceFigures, ...], SourceFigures]:
    """The figures of each source, and of all together.

    Args:
        fitted: the samples after the over-long policy.
        names: of the sources.
        drawn: draws from each in an epoch.
        limits: of one sample.
    """
    edges = fitted.table.source_starts.tolist()
    usable = np.flatnonzero(fitted.eligible & ~fitted.table.bad)
    longest = int(fitted.table.num_tokens[usable].max(initial=0))
    figures = [
        _figures(fitted, (edges[d], edges[d + 1]), name, drawn[d], limits, longest)
        for d, name in enumerate(names)
    ]
    whole = (0, fitted.table.num_samples)
    return tuple(figures), _figures(fitted, whole, "total", sum(drawn), limits, longest)


def _figures(
    fitted: Fitted,
    numbers: tuple[int, int],
    name: str,
    drawn: int,
    limits: SampleLimits,
    longest: int,
) -> SourceFigures:
    table, (start, stop) = fitted.table, numbers
    good = np.flatnonzero(fitted.eligible[start:stop] & ~table.bad[start:stop]) + start
    dropped = np.asarray([d.number for d in fitted.dropped if start <= d.number < stop], np.int64)
    too_long = int((table.num_tokens[dropped] > limits.seq_length).sum())
    by_limit = zip(limits.in_words, (too_long, dropped.size - too_long), strict=True)
    tokens = table.num_tokens[good]
    bad = Counter(kind for n, (kind, _) in table.faults.items() if start <= n < stop)
    return SourceFigures(
        name=name,
        num_samples=int(fitted.eligible[start:stop].sum()) + dropped.size,
        num_usable=int(good.size),
        num_drawn=drawn,
        num_dropped={reason: count for reason, count in by_limit if count},
        num_shrunk=sum(start <= number < stop for number in table.shrunk),
        num_bad=dict(sorted(bad.items())),
        num_tokens=int(tokens.sum()),
        num_image_tokens=int(table.num_image_tokens[good].sum()),
        num_label_tokens=int(table.num_label_tokens[good].sum()),
        num_patches=int(table.num_patches[good].sum()),
        length_percentiles=length_percentiles(tokens),
        length_histogram=histogram(tokens, longest),
    )


def length_percentiles(tokens: Int64s) -> dict[int, int]:
    """Percentile -> tokens, of the sample nearest to it; empty without samples."""
    if not tokens.size:
        return {}
    values = np.percentile(tokens, PERCENTILES, method="nearest").astype(np.int64).tolist()
    return dict(zip(PERCENTILES, values, strict=True))


def histogram(tokens: Int64s, longest: int) -> tuple[tuple[int, int], ...]:
    """(upper edge, samples) of equal bins from 0 to at least `longest` tokens."""
    width = max(1, -(-longest // NUM_BARS))
    counts = np.bincount((np.maximum(tokens, 1) - 1) // width, minlength=-(-longest // width))
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
