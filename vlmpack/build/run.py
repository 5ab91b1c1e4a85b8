"""The remaining settings of a run, with its length and its date.

A run has one date for chat templates that write the day; see `vlmpack.encode.settings`.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmpack.build.extensions import Extensions
from vlmpack.data.packs.manifest import UNFINISHED, read_manifest
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.distributed import Ranks
from vlmpack.encode.settings import reads_clock, today
from vlmpack.errors import PacksError, RecipeError
from vlmpack.evaluation.metrics import Metric
from vlmpack.recipe import Recipe, identity, load_recipe
from vlmpack.recipe.schema import (
    CheckpointSection,
    EvaluationSection,
    ExportSection,
    LoggingSection,
    TrainingSection,
)
from vlmpack.training.run_dir import RunDir
from vlmpack.whole_file import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """What happens around the steps of a run.

    Args:
        metrics: of answers, by the recipe's names for them.
        hooks: those of the callbacks that are called.
    """

    model: str
    has_adapters: bool
    training: TrainingSection
    checkpoint: CheckpointSection
    evaluation: EvaluationSection
    logging: LoggingSection
    export: ExportSection
    identity: Mapping[str, Any]
    metrics: Mapping[str, Metric]
    callbacks: tuple[object, ...]
    hooks: frozenset[str]


def run_spec(recipe: Recipe, extensions: Extensions) -> RunSpec:
    return RunSpec(
        model=recipe.model.path,
        has_adapters=bool(recipe.trainable.uses("lora")),
        training=recipe.training,
        checkpoint=recipe.checkpoint,
        evaluation=recipe.evaluation,
        logging=recipe.logging,
        export=recipe.export,
        identity=identity(recipe),
        metrics=extensions.metrics_of(recipe),
        callbacks=extensions.callbacks,
        hooks=extensions.hooks,
    )


logger = logging.getLogger("vlmpack")


def total_steps(training: TrainingSection, train: TrainData, saved: DataState | None) -> int:
    """Optimizer steps of the run: `max_steps`, or whole epochs.

    Args:
        saved: where the run continues. Steps before a change of the data count as taken.

    Raises:
        RecipeError: the data changed, and `num_epochs` leaves none of the new data to train.
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
    remaining = train.steps_until(epochs, state)
    if remaining <= 0 and 0 < state.batches == state.eras[-1].start_batch:
        raise RecipeError(
            f"training.num_epochs: {epochs}, but the data changed after {state.batches} steps, "
            f"in or behind epoch {state.epoch}. The new data begin the next epoch, so nothing is "
            f"left to train. Set it to {state.epoch + 1} or more, or set training.max_steps instead"
        )
    return state.batches + max(0, remaining)


def resolve_date(recipe: Recipe, ranks: Ranks, run_dir: RunDir | None = None) -> Recipe:
    """The recipe with the date that all ranks, launches and workers write. Collective.

    It is the recipe's date, else that of its packs, of the run's first launch, or of the main
    rank's clock. A template that does not read the clock has no date.
    """

    def logged_date() -> str | None:
        date = recipe.data.date
        day = date_of(recipe, run_dir)
        if day is None and date is not None:
            logger.warning(
                "note: data.date %s changes nothing: the chat template of %s does not write the "
                "date",
                date,
                recipe.model.path,
            )
        elif day is not None:
            logger.info(
                "%-14s %s in every conversation: the chat template writes the day (data.date)",
                "date",
                day,
            )
        return day

    return with_date(recipe, ranks.on_main(logged_date))


def date_of(recipe: Recipe, run_dir: RunDir | None = None) -> str | None:
    """The run's date; None for a template that does not read the clock."""
    day = recipe.data.date or _packs(recipe) or _recorded(run_dir) or today().isoformat()
    return day if reads_clock(Path(recipe.model.path)) else None


def encoder_date(recipe: Recipe) -> datetime.date | None:
    day = date_of(recipe)
    return None if day is None else datetime.date.fromisoformat(day)


def with_date(recipe: Recipe, day: str | None) -> Recipe:
    return recipe if day == recipe.data.date else load_recipe(recipe, {"data.date": day})


def _packs(recipe: Recipe) -> str | None:
    if not recipe.packing.facts.reads_packs or recipe.packing.path is None:
        return None
    try:
        return read_manifest(Path(recipe.packing.path)).encoder.get("date")
    except PacksError:  # whoever opens them says what is wrong
        return None


def date_of_unfinished(folder: Path) -> str | None:
    """The date of packs that were started and will be continued."""
    try:
        content = read_json(folder / UNFINISHED)
        day: str | None = content["encoder"].get("date")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return day


def _recorded(run_dir: RunDir | None) -> str | None:
    recorded = run_dir.recorded_identity() if run_dir is not None else None
    day = (recorded or {}).get("data.date")
    return day if isinstance(day, str) else None
