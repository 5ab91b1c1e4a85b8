"""One launch of a run on one rank, opened: its parts, and the training to the last step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vlmpack.activity import ACTIVITY
from vlmpack.backends.engine import Engine
from vlmpack.build.run import RunSpec
from vlmpack.data.loading.loader import GlobalStep, MicroBatch
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.encode import Encoder
from vlmpack.proof.rows.view import show_first_sample
from vlmpack.run.begun_steps import BegunSteps
from vlmpack.run.place import Place
from vlmpack.training.trainer import Trainer


@dataclass(slots=True, kw_only=True)
class Session:
    """Everything that one rank holds while it works on a run.

    Args:
        spec: what happens around the steps.
        place: where this rank works.
        encoder: of the model folder.
        train: the training split.
        test: the split whose questions are answered, if the recipe asks for that.
        engine: the model.
        trainer: the loop, resumed where there was a checkpoint.
        begun: the global batches.
    """

    spec: RunSpec
    place: Place
    encoder: Encoder
    train: TrainData
    test: TrainData | None
    engine: Engine
    trainer: Trainer
    begun: BegunSteps

    def run(self) -> None:
        """Train from where the trainer stands to the last step.

        Raises:
            Preempted, NonFiniteError, DataError, DataLimitError: see their classes.
        """
        begun, check = self.trainer.totals.step, self.trainer.stepper.check
        try:
            self.trainer.run(self._steps())
            if self.place.ranks.is_main and check is not None and self.trainer.totals.step > begun:
                check.name_untrained()
        finally:
            ACTIVITY.enter_alone("ending the steps")
            self.close()

    def close(self) -> None:
        """Close what the run writes and end the loader processes, if that has not been done."""
        for listener in self.trainer.listeners:
            listener.close()
        self.begun.close()

    def tell_end(self) -> None:
        """Callbacks are told that all is written. Collective where there are some."""
        ranks = self.place.ranks
        figures = self.place.run_dir.final_figures() if ranks.is_main else {}
        self.trainer.listeners.callbacks.tell("on_end", figures)

    def _steps(self) -> Iterator[GlobalStep]:
        """The data layer's global batches."""
        text = self.trainer.totals.data_state
        state = self.train.start()
        if text is not None:
            state = self.train.admit(DataState.from_json(text))
        shown = not self.place.ranks.is_main
        for step in self.begun.take(state):
            shown = shown or self._show_sample(step.micro_batches)
            yield step

    def _show_sample(self, micro_batches: Sequence[MicroBatch]) -> bool:
        return show_first_sample(
            [micro_batch.batch for micro_batch in micro_batches],
            self.encoder,
            self.place.run_dir.path,
            quiet=self.spec.logging.progress == "none",
        )
