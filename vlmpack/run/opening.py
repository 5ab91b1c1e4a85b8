"""The model of a run and its surroundings, opened on one rank after its splits.

A launch continues from the newest checkpoint that verifies, at its place in the data.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmpack.activity import ACTIVITY
from vlmpack.backends.engine import Engine
from vlmpack.build.engine import EngineSpec, build_engine, policy_rows, policy_table
from vlmpack.build.objective import ObjectiveSpec, build_stepper
from vlmpack.build.run import RunSpec, total_steps
from vlmpack.data.config import DataConfig
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.distributed import Ranks
from vlmpack.distributed.ranks import CollectiveTimeouts, set_timeout
from vlmpack.encode.fingerprint import as_text
from vlmpack.errors import CheckpointError, RunDirError
from vlmpack.evaluation.predictions import drop_predictions_after
from vlmpack.packing import Batch
from vlmpack.recipe.schema import CheckpointSection
from vlmpack.run.place import Place
from vlmpack.run.reference import Reference
from vlmpack.run.session import Prefetch, Session
from vlmpack.run.splits import Splits
from vlmpack.training.bad_steps import BadSteps
from vlmpack.training.callbacks import Callbacks
from vlmpack.training.checkpoint import (
    Saver,
    data_state_of,
    list_checkpoints,
    newest_checkpoint,
    saved_data_state,
)
from vlmpack.training.evaluations import Answers, Best, Validation
from vlmpack.training.model_watch import ModelWatch
from vlmpack.training.record import open_record, take_back, warn_of_damage
from vlmpack.training.replicas import Replicas
from vlmpack.training.reporting import Remarks, Reporting, SkipNotes, Spikes
from vlmpack.training.run_dir import RunDir
from vlmpack.training.step import Stepper
from vlmpack.training.trainer import Listeners, Publication, Totals, Trainer
from vlmpack.whole_file import write_atomically

logger = logging.getLogger("vlmpack")


def open_session(
    place: Place,
    splits: Splits,
    spec: EngineSpec,
    objective: ObjectiveSpec,
    run: RunSpec,
    model: ModelWatch,
    prefetch: Prefetch,
    kept: str,
    resume: ResumePoint | None = None,
) -> Session:
    """Build the model and its surroundings; load the newest checkpoint if configured. Collective.

    Args:
        kept: tensors of the folder that training does not use, in words.
        resume: where to begin; None for what the run's folder and `checkpoint.resume` say.

    Raises:
        VlmpackError: any problem, by its class.
    """
    ranks, run_dir, train = place.ranks, place.run_dir, splits.train
    checkpoint = resume or ranks.on_main(lambda: choose_checkpoint(run.checkpoint, run_dir))
    steps = total_steps(train.config.training, train, checkpoint.state)
    prefetch.start(train, checkpoint.state, max_steps=steps)
    reference = Reference(spec, objective, (train, splits.validation))
    known = reference.refuse_other(model)
    ACTIVITY.enter("launch: loading the model")
    engine = build_engine(spec)
    if kept:
        engine.description["kept"] = f"{kept}: not trained, in the export as they are"
    split = spec.parallelism
    set_timeout(split.timeout_seconds)  # of the engine's own groups too
    fingerprint = known or model.compare_all()
    trained = _describe(spec, engine)
    reference.attach(engine, fingerprint, steps)  # with the folder's weights, before a checkpoint's
    stepper = build_stepper(objective, engine, ranks, total_steps=steps)
    if checkpoint.folder is None:
        stepper.start = reference.start_check(engine)
    skips = SkipNotes(train.ledger)
    trainer = _trainer(
        run,
        place,
        stepper,
        _validation_batches(splits.validation, ranks, run.evaluation.max_samples),
        skips,
        validate_first=objective.section.learns_pairs,
        total_steps=steps,
        timeouts=CollectiveTimeouts(split.timeout_seconds, split.step_timeout_seconds),
        model=fingerprint,
    )
    if checkpoint.folder is not None:
        trainer.resume(checkpoint.folder)
    ranks.on_main(lambda: drop_predictions_after(run_dir.path, trainer.totals.step))
    ranks.on_main(model.keep)
    state = _go_on(trainer, train, place, skips)

    def write_figures() -> None:
        write_atomically(run_dir.trainable, json.dumps(trained, indent=1) + "\n")
        write_atomically(run_dir.data_summary, json.dumps(splits.figures(state)) + "\n")

    ranks.on_main(write_figures)  # a full disk is every rank's error, so that none waits
    return Session(
        spec=run,
        place=place,
        encoder=spec.encoder,
        train=train,
        test=splits.test,
        built=spec,
        engine=engine,
        trainer=trainer,
        prefetch=prefetch,
    )


def _trainer(
    run: RunSpec,
    place: Place,
    stepper: Stepper,
    batches: Callable[[], Iterator[Batch]] | None,
    skips: SkipNotes,
    *,
    validate_first: bool,
    total_steps: int,
    timeouts: CollectiveTimeouts,
    model: Mapping[str, str],
) -> Trainer:
    """The loop and its listeners, at step 0."""
    ranks, run_dir, training = place.ranks, place.run_dir, run.training
    saver = Saver(run_dir.checkpoints, ranks, keep=run.checkpoint.keep)
    reporting = Reporting(
        section=run.logging,
        run_dir=run_dir,
        config=run.identity,
        total_steps=total_steps,
        stepper=stepper,
    )
    callbacks = Callbacks(
        callbacks=run.callbacks,
        hooks=run.hooks,
        ranks=ranks,
        timeouts=timeouts,
        run_dir=run_dir.path,
        total_steps=total_steps,
    )
    return Trainer(
        stepper=stepper,
        total_steps=total_steps,
        checkpoint=run.checkpoint,
        saver=saver,
        timeouts=timeouts,
        stop=place.stop,
        model=model,
        listeners=Listeners(
            replicas=Replicas(stepper),
            remarks=Remarks(stepper.objective, ranks),
            skips=skips,
            spikes=Spikes(ranks),
            reporting=reporting,
            callbacks=callbacks,
            publication=Publication(saver),
            validation=Validation(
                stepper=stepper,
                batches=batches,
                interval=run.evaluation.interval_steps,
                at_start=validate_first,
                reporting=reporting,
                callbacks=callbacks,
            ),
            answers=Answers(reporting=reporting, interval=run.evaluation.generate_interval_steps),
            best=Best.of(run.evaluation),
            bad_steps=BadSteps(
                ledger=skips.ledger,
                ranks=ranks,
                folder=run_dir.dumps,
                skips=training.on_non_finite == "skip",
                most=training.max_skipped_steps,
                seed=training.seed,
                pixels=training.dump_pixels,
            ),
        ),
    )


def _go_on(trainer: Trainer, train: TrainData, place: Place, skips: SkipNotes) -> DataState:
    """Put ledger, record and data back to where the trainer stands."""
    ranks, run_dir = place.ranks, place.run_dir
    totals = trainer.totals
    done, text = totals.step, totals.data_state
    ranks.on_main(lambda: skips.ledger.rewind(done, skipped=totals.num_skipped))
    skips.limiter.replay(batches=done, samples_per_batch=_samples_per_batch(train.config, totals))
    state = train.start() if text is None else train.admit(DataState.from_json(text))
    if 0 < state.batches == state.eras[-1].start_batch:
        logger.info(
            "%-14s the data changed; from global batch %d on, era %d trains epoch %d of them",
            "data",
            state.batches,
            len(state.eras),
            state.epoch,
        )
    ranks.on_main(lambda: take_back(run_dir, done))
    ranks.on_main(lambda: warn_of_damage(run_dir.samples))
    record = open_record(run_dir.samples, ranks, start=done, state=state.to_json())
    if record is not None:
        trainer.listeners.record = record
    return state


def _samples_per_batch(config: DataConfig, totals: Totals) -> int:
    """Samples of a global batch, holes included; where it counts rows, the mean so far."""
    if not config.mode.packing.counts_rows:
        return config.training.global_batch_size
    return max(1, round((totals.num_samples + totals.num_skipped) / max(1, totals.step)))


def _validation_batches(
    split: TrainData | None, ranks: Ranks, most: int | None
) -> Callable[[], Iterator[Batch]] | None:
    """Called once per validation; every rank takes the same number of steps. None without a
    split.
    """
    if split is None:
        return None

    def read() -> Iterator[Batch]:
        ACTIVITY.enter_alone("validation: its first batch")
        for micro in split.eval_batches(
            rank=ranks.dp_rank, dp=ranks.dp_size, max_samples=most, replica=ranks
        ):
            yield micro.batch

    return read


def _describe(spec: EngineSpec, engine: Engine) -> list[dict[str, Any]]:
    """Log what trains what, and return the table of it."""
    for name, value in engine.description.items():
        logger.info("%-14s %s", name, value)
    if spec.encoder.images_made_with is not None:
        logger.info("%-14s %s", "pixels", spec.encoder.images_made_with)
    if given := spec.encoder.chat_template_kwargs:
        logger.info(
            "%-14s %s in every conversation, but where a record has its own "
            "(data.chat_template_kwargs)",
            "template",
            as_text(given),
        )
    trained = policy_rows(engine.components, spec.policy)
    for line in policy_table(trained):
        logger.info("  %s", line)
    return trained


def saved_state(checkpoint: CheckpointSection, run_dir: RunDir) -> DataState | None:
    """Where the newest checkpoint stands in the data, before any of its tensors is looked at."""
    if checkpoint.resume == "never":
        return None
    text = saved_data_state(run_dir.checkpoints)
    return None if text is None else DataState.from_json(text)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where the launch continues: a verified checkpoint and its place in the data, or neither.

    `saved_state` may be of a newer, damaged one, since it is read before the data are opened.
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
