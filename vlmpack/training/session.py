"""One launch of a run on one rank: open or resume, train to the end, and what lies around it."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vlmpack.backends.engine import Engine
from vlmpack.data.loading.ledger import Ledger, SkipLimiter, SkipLimits
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.data.splits.summary import DataSummary
from vlmpack.distributed import Ranks, share_iterator
from vlmpack.errors import CheckpointError, RunDirError
from vlmpack.families import Encoder
from vlmpack.packing import Batch
from vlmpack.recipe import Recipe, derive, identity
from vlmpack.recipe.derived import counts_rows, plans_rows, row_tokens
from vlmpack.training.assemble import (
    build_encoder,
    build_engine,
    build_stepper,
    open_split,
    trainer_config,
)
from vlmpack.training.checkpoint import (
    data_state_of,
    list_checkpoints,
    newest_checkpoint,
    saved_data_state,
)
from vlmpack.training.metrics import MetricsLog, Progress, Trackers
from vlmpack.training.record import StepSamples, open_record
from vlmpack.training.recorded import take_back
from vlmpack.training.run_dir import RunDir, write_atomically
from vlmpack.training.run_length import total_steps
from vlmpack.training.stop import StopFlag
from vlmpack.training.trainer import Reporting, Totals, Trainer, TrainStep

logger = logging.getLogger("vlmpack")

EXAMPLE_MICRO_BATCHES = 12
"""Micro-batches of a launch's first steps that the report draws to scale."""


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
    resumed: bool

    def run(self) -> None:
        """Train from where the trainer stands to the last step.

        Raises:
            Preempted, NonFiniteError, DataError, DataLimitError: see their classes.
        """
        reporting = self._reporting() if self.ranks.is_main else None
        try:
            self.trainer.run(self._steps(), reporting)
        finally:
            if reporting is not None:
                reporting.close()
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
        state = DataState.from_json(text) if text is not None else self.train.start()
        for step in self.train.batches(
            state,
            rank=self.ranks.dp_rank,
            dp=self.ranks.dp_size,
            max_steps=self.trainer.config.total_steps,
        ):
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


def open_session(recipe: Recipe, ranks: Ranks, run_dir: RunDir, stop: StopFlag) -> Session:
    """Build every part of a run and load the newest checkpoint if the recipe says so.

    The cheap checks come first: model folder, data, then weights.

    Raises:
        VlmpackError: whatever is wrong, by its class.
    """
    derived = derive(recipe, ranks.world_size)
    encoder = build_encoder(recipe)
    ledger = Ledger(run_dir.data_errors)
    saved = ranks.on_main(lambda: _saved_state(recipe, run_dir))
    train = open_split(
        recipe, "data.train", encoder, derived, ranks=ranks, ledger=ledger, resume=saved
    )
    assert train is not None  # data.train is required
    validation = open_split(recipe, "data.validation", encoder, derived, ranks=ranks, ledger=ledger)
    test = None
    if recipe.evaluation.generate:
        test = open_split(recipe, "data.test", encoder, derived, ranks=ranks, ledger=ledger)
    summary = train.summary()
    _log_data(recipe, summary)
    engine = build_engine(recipe, encoder, ranks)
    for name, value in engine.description.items():
        logger.info("%-14s %s", name, value)
    checkpoint = ranks.on_main(lambda: _choose_checkpoint(recipe, run_dir))
    steps = total_steps(recipe, train, checkpoint.state)
    limiter = SkipLimiter(SkipLimits(), ledger)
    trainer = Trainer(
        stepper=build_stepper(recipe, engine, ranks, total_steps=steps),
        config=trainer_config(recipe, total_steps=steps),
        run_dir=run_dir,
        stop=stop,
        validation=_validation_batches(recipe, validation, ranks),
        on_skips=lambda samples, skipped: limiter.check(samples=samples, skipped=skipped),
    )
    if checkpoint.folder is not None:
        trainer.resume(checkpoint.folder)
    done = trainer.totals.step
    ranks.on_main(lambda: ledger.rewind(done))
    limiter.replay(batches=done, samples_per_batch=_samples_per_batch(recipe, trainer.totals))
    text = trainer.totals.data_state
    state = train.start() if text is None else train.admit(DataState.from_json(text))
    if 0 < state.batches == state.segments[-1].start_batch:
        logger.info(
            "%-14s the data changed; from global batch %d on, segment %d trains epoch %d of them",
            "data",
            state.batches,
            len(state.segments),
            state.epoch,
        )
    ranks.on_main(lambda: take_back(run_dir, done))
    trainer.record = open_record(run_dir.samples, ranks, start=done, state=state.to_json())
    if ranks.is_main:
        write_atomically(
            run_dir.data_summary, json.dumps(_summary(recipe, train, state, summary)) + "\n"
        )
    return Session(
        recipe=recipe,
        ranks=ranks,
        run_dir=run_dir,
        encoder=encoder,
        train=train,
        validation=validation,
        test=test,
        engine=engine,
        trainer=trainer,
        resumed=checkpoint.folder is not None,
    )


def _samples_per_batch(recipe: Recipe, totals: Totals) -> int:
    """Samples of a global batch, holes included; where it counts rows, the mean so far."""
    if not counts_rows(recipe.packing):
        return recipe.training.global_batch_size
    return max(1, round((totals.num_samples + totals.num_skipped) / max(1, totals.step)))


def _saved_state(recipe: Recipe, run_dir: RunDir) -> DataState | None:
    """Where the newest checkpoint stands in the data, before any of its tensors is looked at."""
    if recipe.checkpoint.resume == "never":
        return None
    text = saved_data_state(run_dir.checkpoints)
    return None if text is None else DataState.from_json(text)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """Where the launch goes on: a checkpoint that verifies and its place in the data, or neither.

    `_saved_state` may be of a newer one that is damaged: it is asked before the data are opened.
    """

    folder: Path | None = None
    state: DataState | None = None


def _choose_checkpoint(recipe: Recipe, run_dir: RunDir) -> _Checkpoint:
    """The newest checkpoint that verifies, as `checkpoint.resume` has it.

    Raises:
        RunDirError: there are some, and none is wanted.
        CheckpointError: there are some, and none verifies; or there is none, and one is required.
    """
    mode = recipe.checkpoint.resume
    if mode == "never":
        if list_checkpoints(run_dir.checkpoints):
            raise RunDirError(
                f"run_dir: {run_dir.path} holds checkpoints, but checkpoint.resume is never; "
                f"choose another run_dir, or delete this one"
            )
        return _Checkpoint()
    folder, damaged = newest_checkpoint(run_dir.checkpoints)
    if folder is None and damaged:
        listed = "\n".join(f"  {line}" for line in damaged)
        raise CheckpointError(
            f"no checkpoint of this run verifies:\n{listed}\nRestore one, or delete the run "
            f"folder to start anew"
        )
    for line in damaged:
        logger.warning("checkpoint ignored: %s", line)
    if folder is None and mode == "required":
        raise CheckpointError(
            f"checkpoint.resume is required, but {run_dir.checkpoints} holds no checkpoint that "
            f"verifies"
        )
    text = None if folder is None else data_state_of(folder)
    return _Checkpoint(folder, None if text is None else DataState.from_json(text))


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


def _summary(
    recipe: Recipe, train: TrainData, state: DataState, summary: DataSummary
) -> dict[str, Any]:
    """data-summary.json: what the report draws, from lengths alone.

    Args:
        state: where the launch begins; the examples are its first micro-batches, fewer where its
            window has fewer: other ranks wait, and no further shard is indexed for them.
    """
    usable = train.split.usable_tokens().tolist()
    window = train.plan.packed(state.position, state.cursors)[state.batch :]
    bins = [samples for batch in window for samples in batch][:EXAMPLE_MICRO_BATCHES]
    examples = [[train.ref(number).num_tokens for number in samples] for samples in bins]
    return {
        "packing_mode": recipe.packing.mode,
        "length_histogram": {str(n): count for n, count in sorted(Counter(usable).items())},
        "padded_tokens_none": summary.padded_slots,
        "packed_tokens": summary.packed_slots,
        "real_tokens": summary.epoch_tokens,
        "example_micro_batches": examples,
        "summary": asdict(summary),
    }


def _log_data(recipe: Recipe, summary: DataSummary) -> None:
    """What the packing mode does to this data, in one line."""
    saved = summary.padding_removed / max(1, summary.padded_slots)
    lengths = summary.length_percentiles
    left_out = summary.num_samples - summary.num_usable
    logger.info(
        "%-14s %d samples%s, %d to %d tokens (median %d), %s%d steps an epoch",
        "data",
        summary.num_usable,
        f" ({left_out} of {summary.num_samples} left out)" if left_out else "",
        lengths[0],
        lengths[100],
        lengths[50],
        "" if summary.epoch_is_exact else "about ",
        summary.epoch_steps,
    )
    if summary.num_indexed < summary.num_shards:
        logger.info(
            "%-14s %d of %d shards are read so far, and these figures are theirs; the others are "
            "indexed ahead of use",
            "index",
            summary.num_indexed,
            summary.num_shards,
        )
    if recipe.packing.mode == "none":
        what = f"rows are padded: {saved:.0%} of the slots of an epoch hold no token"
    elif plans_rows(recipe.packing):
        capacity = row_tokens(recipe.packing, recipe.training, recipe.parallelism)
        what = (
            f"rows of up to {capacity} tokens, {summary.row_samples / summary.num_rows:.1f} "
            f"samples each, {summary.epoch_tokens / (summary.num_rows * capacity):.1%} full"
        )
    else:
        what = (
            f"each micro-batch of {recipe.training.micro_batch_size} samples is one row; "
            f"{saved:.0%} of the slots that padded rows would take are gone"
        )
    logger.info("%-14s %s: %s", "packing", recipe.packing.mode, what)
