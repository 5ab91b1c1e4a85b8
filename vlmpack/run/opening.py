"""Every part of a run, opened on one rank: the cheap checks first, then data, then the model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from vlmpack.activity import ACTIVITY
from vlmpack.backends.engine import Engine
from vlmpack.build.data import open_split
from vlmpack.build.engine import build_engine, build_stepper, check_model
from vlmpack.build.policy import check_policy, policy_rows, policy_table
from vlmpack.build.run_length import total_steps
from vlmpack.build.setup import Setup
from vlmpack.build.shard_listing import LISTING_NAME, ShardListing
from vlmpack.data.config import DataConfig
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.data.splits.checks import name_unknown_keys
from vlmpack.data.splits.summary import DataSummary, share_words
from vlmpack.distributed.timeouts import CollectiveTimeouts, set_timeout
from vlmpack.encode.fingerprint import as_text
from vlmpack.evaluation.predictions import drop_predictions_after
from vlmpack.packing import Batch
from vlmpack.proof.verify.at_start import verify_at_start
from vlmpack.proof.verify.gate import require_proof
from vlmpack.run.begun_steps import BegunSteps
from vlmpack.run.data_summary import data_summary, log_data, log_graphs
from vlmpack.run.launch_memory import settled_memory
from vlmpack.run.place import Place
from vlmpack.run.reference import attach_reference, refuse_other_reference, start_check
from vlmpack.run.resume_point import choose_checkpoint, saved_state
from vlmpack.run.session import Session
from vlmpack.run.skip_notes import SkipNotes
from vlmpack.training.best import Best
from vlmpack.training.callbacks import Callbacks
from vlmpack.training.model_watch import ModelWatch, watched_model
from vlmpack.training.record import open_record
from vlmpack.training.record_history import take_back, warn_of_damage
from vlmpack.training.reporting import Totals
from vlmpack.training.trainer import Trainer
from vlmpack.whole_file import write_atomically

logger = logging.getLogger("vlmpack")


def open_session(setup: Setup, place: Place) -> Session:
    """Build every part of a run and load the newest checkpoint if the recipe says so.

    The cheap checks come first: the names of the model folder's weights, data, then weights, whose
    digests are made meanwhile.

    Raises:
        VlmpackError: whatever is wrong, by its class.
    """
    ranks, folder, adapter = place.ranks, setup.encoder.folder, setup.recipe.model.adapter
    unread = check_model(folder, ranks)
    check_policy(setup.policy, setup.encoder, ranks.device, adapter=adapter)
    begun = BegunSteps(ranks)
    watched = watched_model(folder, ranks, place.run_dir, adapter)
    with watched as model, begun.ended_on_error():
        model.leave_former()
        return _open(setup, place, model, begun, unread)


def _open(setup: Setup, place: Place, model: ModelWatch, begun: BegunSteps, unread: str) -> Session:
    recipe, ranks, run_dir = setup.recipe, place.ranks, place.run_dir
    ledger, split = Ledger(run_dir.data_errors), recipe.parallelism
    saved = ranks.on_main(lambda: saved_state(recipe.checkpoint, run_dir))
    splits = _open_splits(setup, place, ledger, saved)
    train = splits.train
    setup = settled_memory(setup, train)
    if setup.encoder.family.proven_by_verify:
        require_proof(setup, run_dir.verify, train, model.hashing.finish())
    elif recipe.training.verify and saved is None:
        verify_at_start(setup, run_dir.verify, train)
    checkpoint = ranks.on_main(lambda: choose_checkpoint(recipe.checkpoint, run_dir))
    steps = total_steps(recipe.training, train, checkpoint.state)
    begun.begin(train, checkpoint.state, max_steps=steps)
    known = refuse_other_reference(setup, model, (train, splits.validation))
    ACTIVITY.enter("launch: loading the model")
    engine = build_engine(setup)
    if unread:
        engine.description["kept"] = f"{unread}: not trained, in the export as they are"
    set_timeout(split.timeout_seconds)  # of the engine's own groups too
    fingerprint = known or model.settle()
    trained = _describe(setup, engine)
    for pairs in (train, splits.validation):  # with the folder's weights, before a checkpoint's
        attach_reference(setup, engine, fingerprint, pairs)
    stepper = build_stepper(setup, engine, total_steps=steps)
    if checkpoint.folder is None:
        stepper.start = start_check(setup, engine, train)
    skips = SkipNotes(ledger)
    trainer = Trainer(
        stepper=stepper,
        total_steps=steps,
        checkpoint=recipe.checkpoint,
        validation_interval=recipe.evaluation.interval_steps,
        log_interval=recipe.logging.interval_steps,
        timeouts=CollectiveTimeouts(split.timeout_seconds, split.step_timeout_seconds),
        run_dir=run_dir,
        stop=place.stop,
        validation=_validation_batches(setup, splits.validation),
        on_skips=skips,
        model=fingerprint,
        validate_first=recipe.objective.learns_pairs,
        answer_interval=recipe.evaluation.generate_interval_steps,
        best=Best.of(recipe.evaluation),
        callbacks=Callbacks(
            callbacks=setup.extensions.callbacks,
            hooks=setup.extensions.hooks,
            ranks=ranks,
            run_dir=run_dir.path,
            total_steps=steps,
        ),
    )
    if checkpoint.folder is not None:
        trainer.resume(checkpoint.folder)
    ranks.on_main(lambda: drop_predictions_after(run_dir.path, trainer.totals.step))
    ranks.on_main(model.keep)
    state = _go_on(trainer, train, place, skips)

    def write_figures() -> None:
        write_atomically(run_dir.trainable, json.dumps(trained, indent=1) + "\n")
        figures = data_summary(train, state, splits.summary)
        figures["test_also_in"] = splits.test_also_in
        write_atomically(run_dir.data_summary, json.dumps(figures) + "\n")

    ranks.on_main(write_figures)  # a full disk is every rank's error, so that none waits
    return Session(
        setup=setup,
        place=place,
        train=train,
        test=splits.test,
        engine=engine,
        trainer=trainer,
        begun=begun,
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
    trainer.record = open_record(run_dir.samples, ranks, start=done, state=state.to_json())
    return state


class _Splits(NamedTuple):
    """The recipe's data, and what was found of the training split."""

    train: TrainData
    validation: TrainData | None
    test: TrainData | None
    summary: DataSummary
    test_also_in: list[str] | None
    """The other splits that hold shards of the test split; None where that is not known."""


def _validation_batches(
    setup: Setup, split: TrainData | None
) -> Callable[[], Iterator[Batch]] | None:
    """Called once per validation; every rank takes the same number of steps. None without a
    split."""
    if split is None:
        return None
    ranks, most = setup.ranks, setup.recipe.evaluation.max_samples

    def read() -> Iterator[Batch]:
        ACTIVITY.enter_alone("validation: its first batch")
        for micro in split.eval_batches(
            rank=ranks.dp_rank, dp=ranks.dp_size, max_samples=most, replica=ranks
        ):
            yield micro.batch

    return read


def _open_splits(setup: Setup, place: Place, ledger: Ledger, saved: DataState | None) -> _Splits:
    """Opens them, and says what they hold."""
    listing = ShardListing(place.run_dir.path / LISTING_NAME)
    shards: dict[str, set[str]] = {}
    train = open_split(setup, "data.train", ledger, resume=saved, listing=listing, shards=shards)
    assert train is not None  # data.train is required
    validation = open_split(setup, "data.validation", ledger, shards=shards)
    test = None
    if setup.recipe.evaluation.generate:
        test = open_split(setup, "data.test", ledger, shards=shards)
    summary = train.summary()
    unit = "pairs" if setup.recipe.objective.learns_pairs else "samples"
    log_data(train.config, summary, unit)
    if validation is not None and validation.config.share is not None:
        logger.info(
            "%-14s %s", "validation", share_words(validation.config, validation.fitted, unit)
        )
    log_graphs(train.config.mode, summary)
    for split in (validation, test):
        if split is not None:
            name_unknown_keys(split.fitted.table.unknown_keys, split.config.key)
    return _Splits(train, validation, test, summary, _test_also_in(shards))


def _test_also_in(shards: Mapping[str, set[str]]) -> list[str] | None:
    """The splits beside the test split that hold some of its shards."""
    asked = shards.get("data.test")
    if not asked or not all(shards.values()):
        return None
    return [key for key, own in shards.items() if key != "data.test" and own & asked]


def _describe(setup: Setup, engine: Engine) -> list[dict[str, Any]]:
    """Says what trains what; returns the table of it."""
    for name, value in engine.description.items():
        logger.info("%-14s %s", name, value)
    if setup.encoder.images_made_with is not None:
        logger.info("%-14s %s", "pixels", setup.encoder.images_made_with)
    if given := setup.encoder.chat_template_kwargs:
        logger.info(
            "%-14s %s in every conversation, but where a record has its own "
            "(data.chat_template_kwargs)",
            "template",
            as_text(given),
        )
    trained = policy_rows(engine.components, setup.policy)
    for line in policy_table(trained):
        logger.info("  %s", line)
    return trained


def _samples_per_batch(config: DataConfig, totals: Totals) -> int:
    """Samples of a global batch, holes included; where it counts rows, the mean so far."""
    if not config.mode.packing.counts_rows:
        return config.training.global_batch_size
    return max(1, round((totals.num_samples + totals.num_skipped) / max(1, totals.step)))
