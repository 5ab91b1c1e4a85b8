"""Where a launch goes on: the newest checkpoint that verifies, and its place in the data."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from vlmpack.data.plan.state import DataState
from vlmpack.errors import CheckpointError, RunDirError
from vlmpack.recipe.schema import CheckpointSection
from vlmpack.training.checkpoint import (
    data_state_of,
    list_checkpoints,
    newest_checkpoint,
    saved_data_state,
)
from vlmpack.training.run_dir import RunDir

logger = logging.getLogger("vlmpack")


def saved_state(checkpoint: CheckpointSection, run_dir: RunDir) -> DataState | None:
    """Where the newest checkpoint stands in the data, before any of its tensors is looked at."""
    if checkpoint.resume == "never":
        return None
    text = saved_data_state(run_dir.checkpoints)
    return None if text is None else DataState.from_json(text)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where the launch goes on: a checkpoint that verifies and its place in the data, or neither.

    `saved_state` may be of a newer one that is damaged: it is asked before the data are opened.
    """

    folder: Path | None = None
    state: DataState | None = None


def choose_checkpoint(checkpoint: CheckpointSection, run_dir: RunDir) -> ResumePoint:
    """The newest checkpoint that verifies, as `checkpoint.resume` has it.

    Raises:
        RunDirError: there are some, and none is wanted.
        CheckpointError: there are some, and none verifies; or there is none, and one is required.
    """
    if checkpoint.resume == "never":
        if list_checkpoints(run_dir.checkpoints):
            raise RunDirError(
                f"run_dir: {run_dir.path} holds checkpoints, but checkpoint.resume is never; "
                f"choose another run_dir, or delete this one"
            )
        return ResumePoint()
    folder, damaged = newest_checkpoint(run_dir.checkpoints)
    if folder is None and damaged:
        listed = "\n".join(f"  {line}" for line in damaged)
        raise CheckpointError(
            f"no checkpoint of this run verifies:\n{listed}\nRestore one, or delete the run "
            f"folder to start anew"
        )
    for line in damaged:
        logger.warning("checkpoint ignored: %s", line)
    if folder is None and checkpoint.resume == "required":
        raise CheckpointError(
            f"checkpoint.resume is required, but {run_dir.checkpoints} holds no checkpoint that "
            f"verifies"
        )
    text = None if folder is None else data_state_of(folder)
    return ResumePoint(folder, None if text is None else DataState.from_json(text))
