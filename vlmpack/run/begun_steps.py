"""The run's global batches, which the loader's workers read while the model is loaded."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

from vlmpack.data.loading.loader import GlobalStep
from vlmpack.data.loading.replica import raise_in_replica
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.distributed import Ranks


class BegunSteps:
    """Global batches from the state on that a run goes on from; workers are at work on the first
    ones before anything is taken.

    Args:
        ranks: who this process is.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._state: DataState | None = None
        self._steps: Generator[GlobalStep] | None = None
        self._failure: Exception | None = None

    def begin(self, train: TrainData, saved: DataState | None, *, max_steps: int) -> None:
        """Starts the workers; what fails is raised by `take`, where a replica's processes all hear
        of it.

        Args:
            train: the split.
            saved: where the run goes on; None for a new one.
            max_steps: the run's total.
        """
        ranks = self._ranks
        try:
            self._state = train.start() if saved is None else train.admit(saved)
            self._steps = train.begin(
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
            state: where the model stands, admitted; that of the checkpoint that `begin` was told.

        Raises:
            RunIdentityError, DataError: what `begin` met.
        """
        if self._failure is not None:
            raise_in_replica(self._failure, self._ranks)
        assert self._steps is not None and state == self._state
        return self._steps

    def close(self) -> None:
        """End the worker processes."""
        if self._steps is not None:
            self._steps.close()

    @contextmanager
    def ended_on_error(self) -> Iterator[None]:
        """Ends the workers where the launch fails after they began."""
        try:
            yield
        except BaseException:
            self.close()
            raise
