"""The listeners of a run that reports and evaluates nothing, unless a test gives it something."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from support.engines import single_rank

from vlmpack.distributed.ranks import CollectiveTimeouts
from vlmpack.recipe.schema import LoggingSection
from vlmpack.training.callbacks import Callbacks
from vlmpack.training.evaluations import Answers, Validation
from vlmpack.training.listener import Boundary, Listener
from vlmpack.training.reporting import Remarks, Reporting
from vlmpack.training.run_dir import RunDir
from vlmpack.training.trainer import Listeners, Publication


class _Silent(Reporting):
    def on_start(self, here: Boundary) -> None:
        """Open nothing."""


def listeners_of(
    stepper: Any,
    run_dir: RunDir,
    *,
    saver: Any = None,
    callbacks: Callbacks | None = None,
    reports: bool = False,
) -> Listeners:
    """They write metrics.jsonl with `reports` alone, which needs a whole stepper."""
    if callbacks is None:
        callbacks = Callbacks(
            callbacks=(),
            hooks=(),
            ranks=single_rank(),
            timeouts=CollectiveTimeouts(first=60, later=60),
            run_dir=run_dir.path,
            total_steps=1,
        )
    reporting = (Reporting if reports else _Silent)(
        section=LoggingSection(trackers=(), progress="none"),
        run_dir=run_dir,
        config={},
        total_steps=1,
        stepper=stepper,
    )
    return Listeners(
        remarks=Remarks(stepper.objective, stepper.ranks),
        skips=Listener(),
        reporting=reporting,
        callbacks=callbacks,
        publication=Publication(saver or SimpleNamespace(finish=lambda: None)),
        validation=Validation(
            stepper=stepper,
            batches=None,
            interval=None,
            at_start=False,
            reporting=reporting,
            callbacks=callbacks,
        ),
        answers=Answers(reporting=reporting, interval=None),
        best=None,
    )
