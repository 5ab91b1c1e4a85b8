"""What an epoch's rows save where they hold what their samples begin with once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from vlmpack.data.index.table import Int64s
from vlmpack.data.plan.sharing import PlannedSamples
from vlmpack.forecast.layout import Layout
from vlmpack.packing.planned import PlannedSample, planned_tokens
from vlmpack.packing.shared import alike


def shared_slots(layout: Layout, planned: PlannedSamples, multiple: int) -> Int64s:
    """(b,) slots that the segments of each bin take, what they share once.

    Args:
        layout: the bins.
        planned: what is planned of samples.
        multiple: that segments are rounded up to.
    """
    counts = [planned_tokens(samples, multiple) for samples, _ in _bins(layout, planned)]
    return np.asarray(counts, dtype=np.int64)


def shared_sums(layout: Layout, planned: PlannedSamples, multiple: int, values: Int64s) -> Int64s:
    """(b,) what each bin has of something that images take, those that samples share once.

    Args:
        layout, planned, multiple: as of `shared_slots`.
        values: (n,) of the samples: their patches, say.
    """
    found = []
    for samples, places in _bins(layout, planned):
        begins = _begins(samples, multiple)
        found.append(
            sum(int(values[at]) for at, begin in zip(places, begins, strict=True) if begin)
        )
    return np.asarray(found, dtype=np.int64)


def sharing_note(layout: Layout, planned: PlannedSamples, multiple: int) -> str:
    """What sharing saves of the tokens and the vision patches of an epoch, and of how many samples
    groups are, as the rows hold them; arguments as of `shared_slots`."""
    groups, grouped = 0, 0
    for samples, _ in _bins(layout, planned):
        sizes = np.diff([*np.flatnonzero(_begins(samples, multiple)), len(samples)])
        groups += int((sizes > 1).sum())
        grouped += int(sizes[sizes > 1].sum())
    tokens, alone = int(shared_slots(layout, planned, 1).sum()), int(layout.tokens.sum())
    patches = int(shared_sums(layout, planned, multiple, layout.patches).sum())
    images = int(layout.patches.sum())
    return (
        f"packing.share_prefix: an epoch's rows hold {tokens:,} tokens where its samples alone "
        f"have {alone:,} ({alone / max(1, tokens):.2f} times as many), and the tower computes "
        f"{patches:,} patches instead of {images:,} ({images / max(1, patches):.2f} times); "
        f"{grouped:,} samples share something, in groups of {grouped / max(1, groups):.1f}"
    )


def _begins(samples: list[PlannedSample], multiple: int) -> list[bool]:
    """Whether each sample of a bin shares nothing with the one before it."""
    begins = [alike(a[-1], b[0]) < multiple for a, b in pairwise(samples)]
    return [True, *begins][: len(samples)]


def _bins(layout: Layout, planned: PlannedSamples) -> list[tuple[list[PlannedSample], list[int]]]:
    """The samples of each bin that are no holes, and their places in the layout."""
    samples, tokens = planned(layout.numbers), layout.tokens.tolist()
    found = []
    for start, count in zip(layout.bin_starts.tolist(), layout.bins.tolist(), strict=True):
        places = [place for place in range(start, start + count) if tokens[place]]
        found.append(([samples[place] for place in places], places))
    return found
