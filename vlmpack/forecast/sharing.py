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


def sharing_note(layout: Layout, planned: PlannedSamples, multiple: int) -> str:
    """What sharing saves of the tokens and the vision patches of an epoch, and of how many samples
    groups are, as the rows hold them; arguments as of `shared_slots`."""
    patches, groups, grouped = 0, 0, 0
    for samples, costs in _bins(layout, planned):
        begins = [True, *(alike(a[-1], b[0]) < multiple for a, b in pairwise(samples))]
        patches += sum(cost for cost, begin in zip(costs, begins, strict=True) if begin)
        sizes = np.diff([*np.flatnonzero(begins), len(samples)])
        groups += int((sizes > 1).sum())
        grouped += int(sizes[sizes > 1].sum())
    tokens, alone = int(shared_slots(layout, planned, 1).sum()), int(layout.tokens.sum())
    images = int(layout.patches.sum())
    return (
        f"packing.share_prefix: an epoch's rows hold {tokens:,} tokens where its samples alone "
        f"have {alone:,} ({alone / max(1, tokens):.2f} times as many), and the tower computes "
        f"{patches:,} patches instead of {images:,} ({images / max(1, patches):.2f} times); "
        f"{grouped:,} samples share something, in groups of {grouped / max(1, groups):.1f}"
    )


def _bins(layout: Layout, planned: PlannedSamples) -> list[tuple[list[PlannedSample], list[int]]]:
    """The samples of each bin that are no holes, and their patches."""
    samples = planned(layout.numbers)
    tokens, patches = layout.tokens.tolist(), layout.patches.tolist()
    found = []
    for start, count in zip(layout.bin_starts.tolist(), layout.bins.tolist(), strict=True):
        places = [place for place in range(start, start + count) if tokens[place]]
        found.append(([samples[place] for place in places], [patches[place] for place in places]))
    return found
