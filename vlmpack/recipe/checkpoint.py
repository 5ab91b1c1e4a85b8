"""When the run's state is saved, and whether a run continues from it."""

from __future__ import annotations

from typing import Literal

from vlmpack.recipe.sources import Count, Section


class CheckpointSection(Section):
    """When the run's state is saved, and whether a run continues from it."""

    interval_steps: Count | None = None
    """Optimizer steps between two checkpoints. Null: only at the end and on SIGTERM."""

    keep: Count = 2
    """Newest checkpoints that stay on disk."""

    asynchronous: bool = False
    """Copy the state and write it while training goes on; needs host memory for a copy of each
    process's share. The last checkpoint, and the one on SIGTERM, are always waited for."""

    resume: Literal["auto", "never", "required"] = "auto"
    """`auto`: continue from the run folder's newest checkpoint if it has one; `never`: start
    anew; `required`: stop if there is none."""

    on_data_change: Literal["refuse", "new_era", "new_segment"] = "refuse"
    """A resume with other shards, rewritten ones, or other weights: stop with the differences, or
    go on with the new data from the next global batch, as a new era that begins an epoch.
    `new_segment` is what earlier versions called `new_era`."""
