"""The order in which a step reaches the listeners of a run, and what each may build upon."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines import single_rank
from support.listeners import listeners_of

from vlmpack import Callback, Event
from vlmpack.data.loading.loader import GlobalStep
from vlmpack.data.plan.state import DataState
from vlmpack.distributed.ranks import CollectiveTimeouts
from vlmpack.recipe.schema import CheckpointSection
from vlmpack.training.callbacks import Callbacks, hooks_of
from vlmpack.training.evaluations import Best
from vlmpack.training.listener import Listener, TrainStep
from vlmpack.training.objective import SFT
from vlmpack.training.run_dir import RunDir
from vlmpack.training.step import StepSums
from vlmpack.training.stop import StopFlag
from vlmpack.training.trainer import Listeners, Trainer

ORDER = [
    "replicas",
    "remarks",
    "record",
    "skips",
    "spikes",
    "reporting",
    "on_step of step 1, with its row",
    "on_checkpoint of the step before",
    "on_validation",
    "answers",
    "best by validation_loss",
    "save",
]
"""One step of a run, as the files, the log and the program's callbacks see it."""


class Notes(Listener):
    """Notes that a step came, and leaves its row where `reporting` does."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def on_step(self, step: TrainStep) -> None:
        self.events.append(self.name)
        if self.name == "reporting":
            step.row = {"loss": 1.0}

    def validated(self, *_: Any) -> None: ...

    evaluated = validated


class Told(Callback):
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def on_step(self, event: Event) -> None:
        row = ", with its row" if event.figures else ""
        self.events.append(f"on_step of step {event.step}{row}")

    def on_checkpoint(self, event: Event) -> None:
        self.events.append("on_checkpoint of the step before")

    def on_validation(self, event: Event) -> None:
        self.events.append("on_validation")


class Judges(Best):
    events: list[str]

    def judge(self, step: int, figures: Any) -> bool:
        is_best = super().judge(step, figures)
        if figures:
            self.events.append(f"best by {', '.join(sorted(figures))}")
        return is_best


def order_of(run_dir: Path, swapped: tuple[int, int] | None = None) -> list[str]:
    """What one step leads to."""
    events: list[str] = []
    sums = StepSums(totals={}, loss=1.0)
    stepper: Any = SimpleNamespace(
        ranks=single_rank(),
        objective=SFT,
        train=lambda *_, **__: (sums, {}),
        evaluate=lambda _: StepSums(totals={"loss_sum": 1.0, "num_label_tokens": 2}, loss=0.5),
        engine=SimpleNamespace(parameter_shapes=dict, optimizer_steps=0, owned_slices=None),
    )
    told, timeouts = [Told(events)], CollectiveTimeouts(first=60, later=60)
    saver: Any = SimpleNamespace(
        is_writing=False,
        finish=lambda: saver.published(0, run_dir) if "save" not in events else None,
        save=lambda *_: events.append("save"),
        abandon=lambda: None,
        wait_for_copy=lambda: None,
    )
    callbacks = Callbacks(
        callbacks=told,
        hooks=hooks_of(told),
        ranks=single_rank(),
        timeouts=timeouts,
        run_dir=run_dir,
        total_steps=2,
    )
    listeners = listeners_of(stepper, RunDir(run_dir), saver=saver, callbacks=callbacks)
    for name in ("replicas", "remarks", "record", "skips", "spikes", "reporting"):
        setattr(listeners, name, Notes(name, events))
    listeners.validation.batches, listeners.validation.interval = (lambda: [None]), 1
    listeners.validation.reporting = listeners.answers.reporting = listeners.reporting
    listeners.answers.interval = 1
    listeners.answers.ask = lambda: events.append("answers") or {}  # type: ignore[func-returns-value]
    listeners.best = Judges("validation_loss")
    listeners.best.events = events

    class Swapped(Listeners):
        def __iter__(self) -> Iterator[Listener]:
            order = list(super().__iter__())
            if swapped is not None:
                one, two = swapped
                order[one], order[two] = order[two], order[one]
            return iter(order)

    trainer = Trainer(
        stepper=stepper,
        total_steps=2,
        checkpoint=CheckpointSection(interval_steps=None),
        saver=saver,
        timeouts=timeouts,
        stop=StopFlag(),
        listeners=Swapped(**{f.name: getattr(listeners, f.name) for f in fields(listeners)}),
    )
    step = GlobalStep(
        epoch=0, batch=0, num_samples=0, num_rows=0, imbalance=1.0, micro_batches=(),
        state=DataState(0, 0, 0, 0, (), ()),
    )  # fmt: skip

    def one() -> Iterator[GlobalStep]:
        yield step
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.run(one())
    return events


def test_a_step_reaches_the_listeners_in_this_order(tmp_path: Path) -> None:
    assert order_of(tmp_path) == ORDER


@pytest.mark.parametrize("first", range(len(fields(Listeners)) - 2))  # `bad_steps` has no `on_step`
def test_two_listeners_in_each_others_place_are_seen(tmp_path: Path, first: int) -> None:
    assert order_of(tmp_path, (first, first + 1)) != ORDER
