"""What an epoch's rows save where they hold what their samples begin with once."""

from __future__ import annotations

import numpy as np

from vlmpack.data.index.table import Int64s
from vlmpack.data.plan.sharing import HeldRows, PlannedSamples, held_rows
from vlmpack.forecast.layout import Layout


def held_by(layout: Layout, planned: PlannedSamples, multiple: int) -> HeldRows:
    """What the bins of a layout hold, one pass over its samples.

    Args:
        layout: the bins.
        planned: what is planned of samples.
        multiple: that segments are rounded up to.
    """
    return held_rows(planned(layout.numbers), layout.bins.tolist(), multiple)


def shown_by(layout: Layout, held: HeldRows, values: Int64s) -> Int64s:
    """(b,) what each bin has of something that images take, those that samples share once.

    Args:
        layout: the bins.
        held: by these.
        values: (n,) of the samples: their patches, say.
    """
    return layout.by_bin(np.where(held.begins, values, 0))


def sharing_note(layout: Layout, held: HeldRows) -> str:
    """What sharing saves of the tokens and the vision patches of an epoch, and of how many samples
    groups are, as the rows hold them; arguments as of `shown_by`."""
    kept = np.append(held.begins[layout.tokens > 0], True)
    sizes = np.diff(np.flatnonzero(kept))
    groups, grouped = int((sizes > 1).sum()), int(sizes[sizes > 1].sum())
    tokens, alone = int(held.tokens.sum()), int(layout.tokens.sum())
    patches = int(shown_by(layout, held, layout.patches).sum())
    images = int(layout.patches.sum())
    return (
        f"packing.share_prefix: an epoch's rows hold {tokens:,} tokens where its samples alone "
        f"have {alone:,} ({alone / max(1, tokens):.2f} times as many), and the tower computes "
        f"{patches:,} patches instead of {images:,} ({images / max(1, patches):.2f} times); "
        f"{grouped:,} samples share something, in groups of {grouped / max(1, groups):.1f}"
    )
