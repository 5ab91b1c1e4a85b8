"""One launch of a run on one rank: its parts, and the training to the last step."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from vlmpack.activity import ACTIVITY
from vlmpack.backends.engine import Engine
from vlmpack.build.engine import EngineSpec
from vlmpack.build.run import RunSpec
from vlmpack.data.loading.loader import GlobalStep, MicroBatch
from vlmpack.data.loading.replica import raise_in_replica
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.proof.rows.view import show_first_sample
from vlmpack.run.launch_memory import out_of_memory_named
from vlmpack.run.place import Place
from vlmpack.training.trainer import Trainer


@dataclass(slots=True, kw_only=True)
class Session:
    """Everything that one rank holds while it works on a run.

    Args:
        test: the split whose questions are answered, if the recipe asks for that.
        built: what the engine was built from.
        trainer: the loop, resumed where there was a checkpoint.
    """

    spec: RunSpec
    place: Place
    encoder: Encoder
    train: TrainData
    test: TrainData | None
    built: EngineSpec
    engine: Engine
    trainer: Trainer
    prefetch: Prefetch

    def run(self) -> None:
        """Train from where the trainer stands to the last step.

        Raises:
            Preempted, NonFiniteError, DataError, DataLimitError: see their classes.
            DeviceMemoryError: a step does not fit the GPU's memory.
        """
        first, check = self.trainer.totals.step, self.trainer.stepper.check
        try:
            with out_of_memory_named(self.built):
                self.trainer.run(self.steps())
            if self.place.ranks.is_main and check is not None and self.trainer.totals.step > first:
                check.name_untrained()
        finally:
            ACTIVITY.enter_alone("ending the steps")
            self.close()

    def close(self) -> None:
        """Close what the run writes and end the loader processes, if that has not been done."""
        for listener in self.trainer.listeners:
            listener.close()
        self.prefetch.close()

    def end(self) -> None:
        """Tell callbacks that all is written. Collective if there are any."""
        ranks = self.place.ranks
        figures = self.place.run_dir.final_figures() if ranks.is_main else {}
        self.trainer.listeners.callbacks.tell("on_end", figures)

    def steps(self) -> Iterator[GlobalStep]:
        """The global batches from where the trainer stands to the last, once."""
        text = self.trainer.totals.data_state
        state = self.train.start()
        if text is not None:
            state = self.train.admit(DataState.from_json(text))
        shown = not self.place.ranks.is_main
        for step in self.prefetch.take(state):
            shown = shown or self._show_sample(step.micro_batches)
            yield step

    def _show_sample(self, micro_batches: Sequence[MicroBatch]) -> bool:
        return show_first_sample(
            [micro_batch.batch for micro_batch in micro_batches],
            self.encoder,
            self.place.run_dir.path,
            quiet=self.spec.logging.progress == "none",
        )


class Prefetch:
    """The run's global batches, which loader workers read ahead while the model is loaded."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._state: DataState | None = None
        self._steps: Generator[GlobalStep] | None = None
        self._failure: Exception | None = None

    def start(self, train: TrainData, saved: DataState | None, *, max_steps: int) -> None:
        """Starts the workers; an error is raised by `take`, on all processes of a replica."""
        ranks = self._ranks
        try:
            self._state = train.start() if saved is None else train.admit(saved)
            self._steps = train.batches(
                self._state,
                rank=ranks.dp_rank,
                dp=ranks.dp_size,
                max_steps=max_steps,
                replica=ranks,
            )
        except Exception as error:
            self._failure = error

    def take(self, state: DataState) -> Iterator[GlobalStep]:
        """The global batches, once. Collective.

        Args:
            state: where the model stands, admitted; the state that `start` was given.

        Raises:
            RunIdentityError, DataError: those of `start`.
        """
        if self._failure is not None:
            raise_in_replica(self._failure, self._ranks)
        assert self._steps is not None and state == self._state
        return self._steps

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """End the workers if the launch fails after they began."""
        try:
            yield
        except BaseException:
            self.close()
            raise
