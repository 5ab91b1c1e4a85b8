"""Every part of a run, opened on one rank: the cheap checks first, then data, then the model."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vlmpack.activity import ACTIVITY
from vlmpack.addresses import is_remote
from vlmpack.backends.engine import Engine
from vlmpack.build.data import LISTING_NAME, DataSpec, ShardListing, open_split
from vlmpack.build.engine import (
    EngineSpec,
    build_engine,
    check_model,
    check_policy,
    policy_rows,
    policy_table,
)
from vlmpack.build.objective import ObjectiveSpec, build_stepper
from vlmpack.build.run import RunSpec, total_steps
from vlmpack.data.config import DataConfig
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.data.splits.checks import name_unknown_keys
from vlmpack.data.splits.summary import DataSummary, share_words
from vlmpack.distributed import Ranks
from vlmpack.distributed.ranks import CollectiveTimeouts, set_timeout
from vlmpack.encode.fingerprint import as_text
from vlmpack.evaluation.predictions import drop_predictions_after
from vlmpack.packing import Batch
from vlmpack.proof.verify.gate import require_proof, verify_at_start
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.run.begun_steps import BegunSteps
from vlmpack.run.data_summary import data_summary, log_data, log_graphs
from vlmpack.run.launch_memory import settled_memory
from vlmpack.run.place import Place
from vlmpack.run.reference import Reference
from vlmpack.run.resume_point import choose_checkpoint
from vlmpack.run.session import Session
from vlmpack.run.skip_notes import SkipNotes
from vlmpack.training.callbacks import Callbacks
from vlmpack.training.checkpoint import Saver
from vlmpack.training.evaluations import Answers, Best, Validation
from vlmpack.training.model_watch import ModelWatch, watched_model
from vlmpack.training.record import open_record, take_back, warn_of_damage
from vlmpack.training.reporting import Remarks, Reporting
from vlmpack.training.step import Stepper
from vlmpack.training.trainer import Listeners, Publication, Totals, Trainer
from vlmpack.whole_file import write_atomically

logger = logging.getLogger("vlmpack")


def open_session(
    place: Place, data: DataSpec, engine: EngineSpec, objective: ObjectiveSpec, run: RunSpec
) -> Session:
    """Build every part of a run and load the newest checkpoint if the recipe says so.

    The cheap checks come first: the names of the model folder's weights, data, then weights, whose
    digests are made meanwhile.

    Raises:
        VlmpackError: whatever is wrong, by its class.
    """
    ranks, folder = place.ranks, engine.encoder.folder
    unread = check_model(folder, ranks)
    check_policy(engine)
    begun = BegunSteps(ranks)
    watched = watched_model(folder, ranks, place.run_dir, engine.model.adapter)
    with watched as model, begun.ended_on_error():
        model.leave_former()
        ledger = Ledger(place.run_dir.data_errors)
        splits = _open_splits(data, run, place, ledger)
        engine = settled_memory(engine, splits.train, answers=run.evaluation.generate)
        _verify(place, data, engine, objective.section, splits.train, model)
        return _open(place, splits, engine, objective, run, model, begun, unread)


def _verify(
    place: Place,
    data: DataSpec,
    engine: EngineSpec,
    objective: ObjectiveSection,
    train: TrainData,
    model: ModelWatch,
) -> None:
    """Compare packed with unpacked before the first step, where model or recipe ask for it."""
    folder = place.run_dir.verify
    if engine.encoder.family.proven_by_verify:
        require_proof(data, engine, objective, folder, train, model.hashing.finish())
    elif data.train.training.verify and data.saved is None:
        verify_at_start(engine, objective, folder, train)


def _open(
    place: Place,
    splits: _Splits,
    spec: EngineSpec,
    objective: ObjectiveSpec,
    run: RunSpec,
    model: ModelWatch,
    begun: BegunSteps,
    unread: str,
) -> Session:
    """The model and all that is around it, for splits that are open."""
    ranks, run_dir, train = place.ranks, place.run_dir, splits.train
    checkpoint = ranks.on_main(lambda: choose_checkpoint(run.checkpoint, run_dir))
    steps = total_steps(train.config.training, train, checkpoint.state)
    begun.begin(train, checkpoint.state, max_steps=steps)
    reference = Reference(spec, objective, (train, splits.validation))
    known = reference.refuse_other(model)
    ACTIVITY.enter("launch: loading the model")
    engine = build_engine(spec)
    if unread:
        engine.description["kept"] = f"{unread}: not trained, in the export as they are"
    split = spec.parallelism
    set_timeout(split.timeout_seconds)  # of the engine's own groups too
    fingerprint = known or model.settle()
    trained = _describe(spec, engine)
    reference.attach(engine, fingerprint)  # with the folder's weights, before a checkpoint's
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
        figures = data_summary(train, state, splits.summary)
        figures["test_also_in"] = _test_also_in(_shards((train, splits.validation, splits.test)))
        write_atomically(run_dir.data_summary, json.dumps(figures) + "\n")

    ranks.on_main(write_figures)  # a full disk is every rank's error, so that none waits
    return Session(
        spec=run,
        place=place,
        encoder=spec.encoder,
        train=train,
        test=splits.test,
        engine=engine,
        trainer=trainer,
        begun=begun,
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
    """The loop and its listeners, at step 0.

    Args:
        batches: of the validation split; None without one.
        validate_first: whether the loss before training is wanted.
        model: digests of the model folder's parts.
    """
    ranks, run_dir = place.ranks, place.run_dir
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
            remarks=Remarks(stepper.objective, ranks),
            skips=skips,
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
        ),
    )


def _go_on(trainer: Trainer, train: TrainData, place: Place, skips: SkipNotes) -> DataState:
    """Put ledger and record back to where the trainer stands; its place in the data."""
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


class _Splits(NamedTuple):
    """The recipe's data, and what was found of the training split."""

    train: TrainData
    validation: TrainData | None
    test: TrainData | None
    summary: DataSummary


def _validation_batches(
    split: TrainData | None, ranks: Ranks, most: int | None
) -> Callable[[], Iterator[Batch]] | None:
    """Called once per validation; every rank takes the same number of steps. None without a
    split.

    Args:
        most: samples to take.
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


def _open_splits(data: DataSpec, run: RunSpec, place: Place, ledger: Ledger) -> _Splits:
    """Opens them, and says what they hold."""
    listing = ShardListing(place.run_dir.path / LISTING_NAME)
    train = open_split(data, "data.train", ledger, listing=listing)
    assert train is not None  # data.train is required
    validation = open_split(data, "data.validation", ledger)
    test = open_split(data, "data.test", ledger) if run.evaluation.generate else None
    summary = train.summary()
    unit = "pairs" if data.encoder.settings.pairs else "samples"
    log_data(train.config, summary, unit)
    if validation is not None and validation.config.share is not None:
        logger.info(
            "%-14s %s", "validation", share_words(validation.config, validation.fitted, unit)
        )
    log_graphs(train.config.mode, summary)
    for split in (validation, test):
        if split is not None:
            name_unknown_keys(split.fitted.table.unknown_keys, split.config.key)
    return _Splits(train, validation, test, summary)


def _shards(splits: Sequence[TrainData | None]) -> dict[str, set[str]]:
    """The shards of each split, as addresses or whole paths; none of packs that hold samples."""
    return {
        split.config.key: {
            path if is_remote(path) else os.path.realpath(path)
            for path in (stamp.path for stamp in split.shards)
        }
        for split in splits
        if split is not None
    }


def _test_also_in(shards: Mapping[str, set[str]]) -> list[str] | None:
    """The other splits that hold shards of the test split; None where that is not known."""
    asked = shards.get("data.test")
    if not asked or not all(shards.values()):
        return None
    return [key for key, own in shards.items() if key != "data.test" and own & asked]


def _describe(spec: EngineSpec, engine: Engine) -> list[dict[str, Any]]:
    """Says what trains what; returns the table of it."""
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


def _samples_per_batch(config: DataConfig, totals: Totals) -> int:
    """Samples of a global batch, holes included; where it counts rows, the mean so far."""
    if not config.mode.packing.counts_rows:
        return config.training.global_batch_size
    return max(1, round((totals.num_samples + totals.num_skipped) / max(1, totals.step)))
