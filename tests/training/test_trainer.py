"""What a training step waits for, and what is none of its time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines import single_rank
from support.handed_over import Stops
from support.listeners import listeners_of

from vlmpack import Callback, Event
from vlmpack.activity import ACTIVITY
from vlmpack.data.loading.loader import GlobalStep
from vlmpack.data.plan.state import DataState
from vlmpack.distributed import Ranks
from vlmpack.distributed.ranks import DAY, CollectiveTimeouts
from vlmpack.errors import (
    CheckpointError,
    DataLimitError,
    ExtensionError,
    NonFiniteError,
    ObjectiveError,
    TrainabilityError,
    VlmpackError,
)
from vlmpack.recipe.schema import CheckpointSection
from vlmpack.training.callbacks import Callbacks, hooks_of
from vlmpack.training.objective import SFT
from vlmpack.training.run_dir import RunDir
from vlmpack.training.step import StepSums
from vlmpack.training.stop import StopFlag
from vlmpack.training.trainer import Trainer

STEPS = 4


events: list[str] = []


class _Steps(CollectiveTimeouts):
    """Knows whether a step's timeout holds."""

    @contextmanager
    def of_step(self, *, is_first: bool) -> Iterator[None]:
        events.append("first step" if is_first else "step")
        try:
            yield
        finally:
            events.append("behind it")

    @contextmanager
    def of_callbacks(self) -> Iterator[None]:
        events.append("(")
        try:
            yield
        finally:
            events.append(")")


class _Saver:
    is_writing = False

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: events.append(name)


class Tells(Callback):
    """Notes when it is told, and what its process is said to do then."""

    def on_step(self, event: Event) -> None:
        events.append(ACTIVITY.phase)

    def on_checkpoint(self, event: Event) -> None:
        events.append(ACTIVITY.phase)


def trainer_of(
    folder: Path, *callbacks: Callback, asynchronous: bool = False, processes: int = 1
) -> Trainer:
    """One whose steps do nothing."""
    events.clear()
    sums = StepSums(totals={}, loss=None)
    stepper: Any = SimpleNamespace(
        ranks=Ranks(world_size=processes),
        objective=SFT,
        train=lambda *_, **__: (sums, {}),
        engine=SimpleNamespace(parameter_shapes=dict, optimizer_steps=0, owned_slices=None),
    )
    saver: Any = _Saver()
    timeouts = _Steps(first=60, later=60)
    return Trainer(
        stepper=stepper,
        total_steps=STEPS,
        checkpoint=CheckpointSection(interval_steps=2, keep=1, asynchronous=asynchronous),
        saver=saver,
        timeouts=timeouts,
        stop=StopFlag(),
        listeners=listeners_of(
            stepper,
            RunDir(folder),
            saver=saver,
            callbacks=Callbacks(
                callbacks=callbacks,
                hooks=hooks_of(callbacks),
                ranks=single_rank(),
                timeouts=timeouts,
                run_dir=folder,
                total_steps=STEPS,
            ),
        ),
    )


def steps() -> Iterator[GlobalStep]:
    step = GlobalStep(
        epoch=0, batch=0, num_samples=0, num_rows=0, imbalance=1.0, micro_batches=(),
        state=DataState(0, 0, 0, 0, (), ()),
    )  # fmt: skip
    return iter([step] * STEPS)


def test_a_checkpoint_is_published_outside_of_the_steps_timeout(tmp_path: Path) -> None:
    """The main rank looks at the files and removes old ones while the others wait for it, for as
    long as any save may take: a later step's time is shorter."""
    trainer_of(tmp_path, asynchronous=True).run(steps())
    whole = ["behind it", "finish"]
    assert events == [
        *("first step", *whole, "step", *whole, "save_in_background"),
        *("step", *whole, "step", *whole, "save", "abandon"),
    ]


def test_callbacks_have_a_time_of_their_own(tmp_path: Path) -> None:
    """An upload in one of them was cut off by the timeout of a step, on all ranks."""
    trainer = trainer_of(tmp_path, Tells())
    trainer.run(steps())
    told = ["(", "callbacks: on_step", ")"]
    assert events[:6] == ["first step", "behind it", *told, "finish"]
    assert events.count("callbacks: on_step") == STEPS
    events.clear()
    trainer._published(2, tmp_path)
    assert events == ["(", "callbacks: on_checkpoint", ")"]


@pytest.mark.parametrize("total", [STEPS, STEPS + 1])
def test_checkpoints_before_dumps_are_kept_until_the_run_ends(tmp_path: Path, total: int) -> None:
    """A save before a signal, or a callback's fault, is not the end of the run."""
    trainer = trainer_of(tmp_path)
    trainer.total_steps = total
    bad: Any = SimpleNamespace(dumped=lambda: [3], state=dict, on_save=lambda: None)
    trainer.listeners.bad_steps = bad
    trainer.totals.step = STEPS
    saved: list[Any] = []
    saver: Any = trainer.saver
    saver.save = lambda content, slices: saved.append(content.dumped)
    trainer.save(last=True)
    assert saved == [[3] if total > STEPS else ()]


class Fails(Callback):
    """At one step, or for one checkpoint."""

    def on_step(self, event: Event) -> None:
        if event.step == 3:
            raise ZeroDivisionError

    def on_checkpoint(self, event: Event) -> None:
        raise ZeroDivisionError


def test_what_a_callback_ends_is_saved_first(tmp_path: Path) -> None:
    """The checkpoint before may be thousands of steps old, or none at all."""
    trainer = trainer_of(tmp_path, Fails())
    trainer.checkpoint = CheckpointSection(interval_steps=None)
    with pytest.raises(ExtensionError, match=r"Fails\.on_step .* at step 3"):
        trainer.run(steps())
    assert trainer.totals.step == 3
    assert events[-4:] == [")", "finish", "save", "abandon"], "and nobody is told of it"


def test_a_checkpoint_that_a_callback_fails_over_is_not_written_twice(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Fails())
    saver: Any = trainer.saver
    saver.save = lambda content, slices: trainer._published(content.step, tmp_path)
    with pytest.raises(ExtensionError, match=r"Fails\.on_checkpoint .* at step 2"):
        trainer.run(steps())
    assert events[-3:] == [")", "finish", "abandon"]


def full(content: Any, slices: Any) -> None:
    raise CheckpointError("the disk is full")


def metric_fails() -> Any:
    raise ExtensionError("metric python:half raised ZeroDivisionError (x.py, line 3)")


GOES_ON = r"\. Mend it, or leave it out: the same call goes on "


@pytest.mark.parametrize(
    ("can_save", "said"),
    [
        (True, "from step 3, which is saved"),
        (
            False,
            "from the checkpoint before, or begins anew where there is none, as step 3 could not "
            "be saved: the disk is full",
        ),
    ],
)
@pytest.mark.parametrize("of", ["callback", "metric"])
def test_from_where_a_run_goes_on_is_said_of_callbacks_and_metrics_alike(
    tmp_path: Path, of: str, can_save: bool, said: str
) -> None:
    """A metric's fault said nothing of it, and was followed by half a sentence where the disk was
    full."""
    trainer = trainer_of(tmp_path, *([Fails()] if of == "callback" else []))
    trainer.checkpoint = CheckpointSection(interval_steps=None)
    if of == "metric":
        answers = trainer.listeners.answers
        answers.ask, answers.interval = metric_fails, 3
    saver: Any = trainer.saver
    if not can_save:
        saver.save = full
    fault = (
        r"Fails\.on_step .* at step 3" if of == "callback" else r"metric python:half .* line 3\)"
    )
    with pytest.raises(ExtensionError, match=f"{fault}{GOES_ON}{said}$"):
        trainer.run(steps())


def test_what_fails_before_the_first_step_says_of_no_checkpoint(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    validation = trainer.listeners.validation
    validation.at_start, validation.batches = True, metric_fails
    with pytest.raises(ExtensionError, match=f"line 3\\){GOES_ON}with the run$"):
        trainer.run(steps())
    assert "save" not in events


@pytest.mark.parametrize(("processes", "published"), [(1, ["finish"]), (2, [])])
def test_an_objectives_fault_saves_nothing(
    tmp_path: Path, processes: int, published: list[str]
) -> None:
    """It is one rank's, and the others come to no save; where there are none, what is still being
    written is published."""
    trainer = trainer_of(tmp_path, processes=processes)

    def failing() -> Iterator[GlobalStep]:
        yield next(steps())
        raise ObjectiveError("of one rank")

    with pytest.raises(ObjectiveError, match=r"of one rank$"):
        trainer.run(failing())
    taken = ["first step", "behind it", "finish", "step", "behind it"]
    assert events == [*taken, *published, "abandon"]


@pytest.mark.parametrize(
    "kind", [NonFiniteError, TrainabilityError, DataLimitError, ObjectiveError]
)
@pytest.mark.parametrize("behind", ["a callback", "the disk"])
def test_what_goes_wrong_behind_the_end_hides_no_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[VlmpackError], behind: str
) -> None:
    """The checkpoint that was still being written is published then, and callbacks are told."""
    trainer = trainer_of(tmp_path, Fails())
    saver: Any = trainer.saver

    def failing() -> Iterator[GlobalStep]:
        raise kind("the cause")
        yield

    def finish() -> None:
        if behind == "the disk":
            full(None, None)
        trainer._published(2, tmp_path)

    saver.finish = finish
    with pytest.raises(kind, match=r"the cause$"):
        trainer.run(failing())
    said = "the disk is full" if behind == "the disk" else "callback Fails.on_checkpoint (callbacks"
    assert f"at the end of a run that failed: {said}" in caplog.text


def test_nobody_waits_where_nobody_listens(tmp_path: Path) -> None:
    trainer_of(tmp_path, Callback()).run(steps())
    assert "(" not in events


def test_the_time_of_callbacks_is_longer_than_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[float] = []
    monkeypatch.setattr("vlmpack.distributed.ranks.set_timeout", set_to.append)
    timeouts = CollectiveTimeouts(first=1800, later=900)
    with timeouts.of_step(is_first=False):
        pass
    with timeouts.of_callbacks():
        pass
    assert set_to == [900, 1800, DAY, 1800]


@pytest.mark.parametrize(("step", "taken"), [(1, 1), (2, 2), (STEPS, STEPS), (STEPS + 1, STEPS)])
def test_a_callback_that_asks_for_the_end_is_heard_before_the_next_step(
    tmp_path: Path, step: int, taken: int
) -> None:
    """The step is saved; at the last step there is nothing to end."""
    trainer = trainer_of(tmp_path, Stops(step))
    trainer.run(steps())
    assert trainer.totals.step == taken and events[-2:] == ["save", "abandon"]
    asked = None if taken == STEPS else "callback Stops.on_step (callbacks[0])"
    assert trainer.stopped_by == asked
    assert (trainer._state()["stopped"] is None) is (asked is None)
