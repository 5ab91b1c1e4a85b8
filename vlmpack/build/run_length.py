"""How many optimizer steps a run takes."""

from __future__ import annotations

import logging

from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.errors import RecipeError
from vlmpack.recipe.schema import TrainingSection

logger = logging.getLogger("vlmpack")


def total_steps(training: TrainingSection, train: TrainData, saved: DataState | None) -> int:
    """Optimizer steps of the run: `max_steps`, or whole epochs.

    Args:
        saved: where the run goes on. What it trained before its data changed counts by its steps.

    Raises:
        RecipeError: the data changed, and `num_epochs` leaves nothing of the new data to train.
    """
    if training.max_steps is not None:
        return training.max_steps
    epochs = training.num_epochs
    assert epochs is not None  # one of the two is set, the recipe's rules see to it
    if not train.epoch_length().exact:
        logger.info(
            "%-14s training.num_epochs needs the number of steps, so every shard is indexed "
            "first; training.max_steps starts at once",
            "data",
        )
        train.split.index_all()
    state = train.start() if saved is None else train.admit(saved)
    left = train.steps_until(epochs, state)
    if left <= 0 and 0 < state.batches == state.eras[-1].start_batch:
        raise RecipeError(
            [
                f"training.num_epochs: {epochs}, but the data changed after {state.batches} steps, "
                f"in or behind epoch {state.epoch}, and the new data begin the one after it: "
                f"nothing is left to train. Set it to {state.epoch + 1} or more, or set "
                "training.max_steps instead"
            ]
        )
    return state.batches + max(0, left)
