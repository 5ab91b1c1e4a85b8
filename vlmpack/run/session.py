"""One launch of a run on one rank: open or resume, train to the end, and what lies around it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vlmpack.activity import ACTIVITY
from vlmpack.backends.engine import Engine
from vlmpack.build.data import build_encoder, open_split
from vlmpack.build.engine import build_engine, build_stepper, check_model, trainer_config
from vlmpack.build.policy import check_policy, policy_rows, policy_table
from vlmpack.build.run_length import total_steps
from vlmpack.build.shard_listing import LISTING_NAME, ShardListing
from vlmpack.data.loading.ledger import Ledger, SkipLimiter, SkipLimits
from vlmpack.data.loading.loader import MicroBatch
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.data.splits.checks import name_unknown_keys
from vlmpack.data.splits.summary import DataSummary
from vlmpack.distributed import Ranks, share_iterator
from vlmpack.distributed.timeouts import set_timeout
from vlmpack.encode import Encoder
from vlmpack.packing import Batch
from vlmpack.proof.rows.first_sample import show_first_sample
from vlmpack.proof.verify.at_start import verify_at_start
from vlmpack.recipe import Recipe, derive, identity
from vlmpack.run.begun_steps import BegunSteps
from vlmpack.run.data_summary import data_summary, log_data
from vlmpack.run.launch_memory import say_memory
from vlmpack.run.place import Place
from vlmpack.run.resume_point import choose_checkpoint, saved_state
from vlmpack.run.skip_notes import SkipNotes
from vlmpack.training.metrics import MetricsLog, Progress, Trackers
from vlmpack.training.model_watch import ModelWatch, recorded_model, watched_model
from vlmpack.training.record import StepSamples, open_record
from vlmpack.training.record_history import take_back, warn_of_damage
from vlmpack.training.run_dir import RunDir, write_atomically
from vlmpack.training.trainer import Reporting, Totals, Trainer, TrainStep

logger = logging.getLogger("vlmpack")


@dataclass(slots=True, kw_only=True)
class Session:
    """Everything that one rank holds while it works on a run.

    Args:
        recipe: the resolved recipe.
        ranks: who this process is.
        run_dir: the run's folder, already prepared and locked.
        encoder: the model folder's processor.
        train, validation, test: the splits; the last two may be absent.
        engine: the model.
        trainer: the loop, resumed where there was a checkpoint.
        begun: the global batches, on the rank that reads for its replica.
        resumed: whether there was one.
    """

    recipe: Recipe
    ranks: Ranks
    run_dir: RunDir
    encoder: Encoder
    train: TrainData
    validation: TrainData | None
    test: TrainData | None
    engine: Engine
    trainer: Trainer
    begun: BegunSteps
    resumed: bool

    def run(self) -> None:
        """Train from where the trainer stands to the last step.

        Raises:
            Preempted, NonFiniteError, DataError, DataLimitError: see their classes.
        """
        reporting = self._reporting() if self.ranks.is_main else None
        begun, check = self.trainer.totals.step, self.trainer.stepper.check
        try:
            self.trainer.run(self._steps(), reporting)
            if self.ranks.is_main and check is not None and self.trainer.totals.step > begun:
                check.name_untrained()
        finally:
            if reporting is not None:
                reporting.close()
            self.begun.close()
            if self.trainer.record is not None:
                self.trainer.record.close()

    def _reporting(self) -> Reporting:
        logging_section = self.recipe.logging
        return Reporting(
            metrics=MetricsLog(self.run_dir.metrics, resume_step=self.trainer.totals.step),
            progress=Progress(
                logging_section.progress,
                total_steps=self.trainer.config.total_steps,
                interval_steps=logging_section.interval_steps,
            ),
            trackers=Trackers(logging_section.trackers, self.run_dir.path, identity(self.recipe)),
        )

    def _steps(self) -> Iterator[TrainStep]:
        """The data layer's global batches, as the trainer takes them: read once per replica."""
        return share_iterator(self.ranks, self._read_steps)

    def _read_steps(self) -> Iterator[TrainStep]:
        text = self.trainer.totals.data_state
        state = self.train.start()
        if text is not None:
            state = self.train.admit(DataState.from_json(text))
        shown = not self.ranks.is_main
        for step in self.begun.take(state):
            shown = shown or self._show_sample(step.micro_batches)
            yield TrainStep(
                epoch=step.epoch,
                batches=[micro_batch.batch for micro_batch in step.micro_batches],
                samples=StepSamples.of(step),
                num_planned=step.num_samples,
                num_rows=step.num_rows,
                imbalance=step.imbalance,
                num_skipped=len(step.skipped),
                read_seconds=sum(m.read_seconds for m in step.micro_batches),
                encode_seconds=sum(m.encode_seconds for m in step.micro_batches),
                data_state=step.state.to_json(),
            )

    def _show_sample(self, micro_batches: Sequence[MicroBatch]) -> bool:
        return show_first_sample(
            [micro_batch.batch for micro_batch in micro_batches],
            self.encoder,
            self.run_dir.path,
            quiet=self.recipe.logging.progress == "none",
        )


def open_session(recipe: Recipe, place: Place) -> Session:
    """Build every part of a run and load the newest checkpoint if the recipe says so.

    The cheap checks come first: model folder and the names of its weights, data, then weights,
    whose digests are made meanwhile.

    Raises:
        VlmpackError: whatever is wrong, by its class.
    """
    ACTIVITY.enter("launch: opening the data")
    ranks, run_dir, folder = place.ranks, place.run_dir, Path(recipe.model.path)
    recorded = recorded_model(folder, ranks, run_dir)
    encoder = build_encoder(recipe)
    check_model(recipe, ranks)
    check_policy(recipe, encoder, ranks)
    begun = BegunSteps(ranks)
    with watched_model(folder, ranks, run_dir, recorded) as model, begun.ended_on_error():
        return _open(recipe, place, encoder, model, begun)


def _open(
    recipe: Recipe, place: Place, encoder: Encoder, model: ModelWatch, begun: BegunSteps
) -> Session:
    ranks, run_dir = place.ranks, place.run_dir
    ledger = Ledger(run_dir.data_errors)
    saved = ranks.on_main(lambda: saved_state(recipe, run_dir))
    splits = _open_splits(recipe, ranks, run_dir, encoder, ledger, saved)
    train = splits.train
    ranks.on_main(lambda: say_memory(recipe, encoder, train, ranks))
    if recipe.training.verify and saved is None:
        verify_at_start(recipe, ranks, run_dir, encoder, train)
    checkpoint = ranks.on_main(lambda: choose_checkpoint(recipe, run_dir))
    steps = total_steps(recipe, train, checkpoint.state)
    begun.begin(train, checkpoint.state, max_steps=steps)
    ACTIVITY.enter("launch: loading the model")
    engine = build_engine(recipe, encoder, ranks)
    set_timeout(recipe.parallelism.timeout_seconds)  # of the engine's own groups too
    fingerprint = model.settle()
    trained = _describe(recipe, encoder, engine)
    limiter, notes = SkipLimiter(SkipLimits(), ledger), SkipNotes(ledger)

    def on_skips(samples: int, skipped: int) -> None:
        notes.note(skipped)
        limiter.check(samples=samples, skipped=skipped)

    trainer = Trainer(
        stepper=build_stepper(recipe, engine, ranks, total_steps=steps),
        config=trainer_config(recipe, total_steps=steps),
        run_dir=run_dir,
        stop=place.stop,
        validation=_validation_batches(recipe, splits.validation, ranks),
        on_skips=on_skips,
        model=fingerprint,
    )
    if checkpoint.folder is not None:
        trainer.resume(checkpoint.folder)
    ranks.on_main(model.keep)
    done = trainer.totals.step
    ranks.on_main(lambda: ledger.rewind(done, skipped=trainer.totals.num_skipped))
    limiter.replay(batches=done, samples_per_batch=_samples_per_batch(recipe, trainer.totals))
    text = trainer.totals.data_state
    state = train.start() if text is None else train.admit(DataState.from_json(text))
    _name_new_era(state)
    ranks.on_main(lambda: take_back(run_dir, done))
    ranks.on_main(lambda: warn_of_damage(run_dir.samples))
    trainer.record = open_record(run_dir.samples, ranks, start=done, state=state.to_json())

    def write_figures() -> None:
        write_atomically(run_dir.trainable, json.dumps(trained, indent=1) + "\n")
        figures = data_summary(recipe, train, state, splits.summary)
        write_atomically(run_dir.data_summary, json.dumps(figures) + "\n")

    ranks.on_main(write_figures)  # a full disk is every rank's error, so that none waits
    return Session(
        recipe=recipe,
        ranks=ranks,
        run_dir=run_dir,
        encoder=encoder,
        train=train,
        validation=splits.validation,
        test=splits.test,
        engine=engine,
        trainer=trainer,
        begun=begun,
        resumed=checkpoint.folder is not None,
    )


class _Splits(NamedTuple):
    """The recipe's data, and what was found of the training split."""

    train: TrainData
    validation: TrainData | None
    test: TrainData | None
    summary: DataSummary


def _open_splits(
    recipe: Recipe,
    ranks: Ranks,
    run_dir: RunDir,
    encoder: Encoder,
    ledger: Ledger,
    saved: DataState | None,
) -> _Splits:
    """Opens them, and says what they hold."""
    derived = derive(recipe, ranks.world_size)
    train = open_split(
        recipe,
        "data.train",
        encoder,
        derived,
        ranks=ranks,
        ledger=ledger,
        resume=saved,
        listing=ShardListing(run_dir.path / LISTING_NAME),
    )
    assert train is not None  # data.train is required
    validation = open_split(recipe, "data.validation", encoder, derived, ranks=ranks, ledger=ledger)
    test = None
    if recipe.evaluation.generate:
        test = open_split(recipe, "data.test", encoder, derived, ranks=ranks, ledger=ledger)
    summary = train.summary()
    log_data(recipe, summary)
    for split in (validation, test):
        if split is not None:
            name_unknown_keys(split.fitted.table.unknown_keys, split.config.key)
    return _Splits(train, validation, test, summary)


def _describe(recipe: Recipe, encoder: Encoder, engine: Engine) -> list[dict[str, Any]]:
    """Says what trains what; returns the table of it."""
    for name, value in engine.description.items():
        logger.info("%-14s %s", name, value)
    if encoder.images_made_with is not None:
        logger.info("%-14s %s", "pixels", encoder.images_made_with)
    trained = policy_rows(engine.components, recipe)
    for line in policy_table(trained):
        logger.info("  %s", line)
    return trained


def _name_new_era(state: DataState) -> None:
    if 0 < state.batches == state.eras[-1].start_batch:
        logger.info(
            "%-14s the data changed; from global batch %d on, era %d trains epoch %d of them",
            "data",
            state.batches,
            len(state.eras),
            state.epoch,
        )


def _samples_per_batch(recipe: Recipe, totals: Totals) -> int:
    """Samples of a global batch, holes included; where it counts rows, the mean so far."""
    if not recipe.packing.counts_rows:
        return recipe.training.global_batch_size
    return max(1, round((totals.num_samples + totals.num_skipped) / max(1, totals.step)))


def _validation_batches(
    recipe: Recipe, validation: TrainData | None, ranks: Ranks
) -> _ValidationBatches | None:
    if validation is None:
        return None
    return _ValidationBatches(validation, ranks, recipe.evaluation.max_samples)


@dataclass(frozen=True, slots=True)
class _ValidationBatches:
    """Called once per validation; every rank takes the same number of steps."""

    data: TrainData
    ranks: Ranks
    max_samples: int | None

    def __call__(self) -> Iterator[Batch]:
        return share_iterator(self.ranks, self._read)

    def _read(self) -> Iterator[Batch]:
        for micro_batch in self.data.eval_batches(
            rank=self.ranks.dp_rank, dp=self.ranks.dp_size, max_samples=self.max_samples
        ):
            yield micro_batch.batch
