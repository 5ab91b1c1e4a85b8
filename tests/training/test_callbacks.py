"""Callbacks: what they are told, that they change nothing, and that one that fails is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.handed_over import Heard, StepExits, StepRaises, StepReturns, Stops, Typo, Writes

from vlmpack import Callback, Event
from vlmpack.distributed import Ranks
from vlmpack.distributed.ranks import CollectiveTimeouts
from vlmpack.errors import ExtensionError
from vlmpack.training.callbacks import HOOKS, Callbacks, check_callbacks, frozen, hooks_of

TIMEOUTS = CollectiveTimeouts(first=60, later=60)


def told(*callbacks: object, ranks: Ranks | None = None) -> Callbacks:
    return Callbacks(
        callbacks=callbacks,
        hooks=hooks_of(callbacks),
        ranks=ranks or Ranks(),
        timeouts=TIMEOUTS,
        run_dir=Path("run"),
        total_steps=9,
    )


def test_a_callback_is_told_what_it_listens_to() -> None:
    heard = Heard()
    callbacks = told(heard, Callback())
    callbacks.tell("on_step", {"loss": 1.5, "seconds": {"data": 1}}, step=3)
    callbacks.on_saved(3, Path("run/checkpoints/step-3"))
    (first, step), (second, saved) = heard.events
    assert (first, second) == ("step", "checkpoint")
    assert (step.step, step.total_steps, step.run_dir) == (3, 9, Path("run"))
    assert step.figures["loss"] == 1.5 and saved.folder == Path("run/checkpoints/step-3")
    with pytest.raises(TypeError):
        step.figures["loss"] = 0.0  # type: ignore[index]
    with pytest.raises(TypeError):
        step.figures["seconds"]["data"] = 0


def test_a_hook_that_is_set_on_an_object_is_one_too() -> None:
    heard, callback = list[Event](), Callback()
    callback.on_step = heard.append  # type: ignore[method-assign]
    told(callback).tell("on_step", step=3)
    assert [event.step for event in heard] == [3] and hooks_of([callback]) == {"on_step"}


def test_ranks_meet_only_where_somebody_listens() -> None:
    class Counts(Ranks):
        def on_main(self, work: Any) -> Any:
            met.append(work())

    met: list[Any] = []
    told(StepRaises(), ranks=Counts()).tell("on_validation")
    told(Callback(), ranks=Counts()).tell("on_step")
    assert met == []
    told(StepRaises(), ranks=Counts()).tell("on_step")
    assert len(met) == 1


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (
            StepRaises(),
            r"StepRaises\.on_step \(callbacks\[1\]\) raised ZeroDivisionError: of my own "
            r"\(handed_over\.py, line \d+\) at step 3$",
        ),
        (
            StepExits(),
            r"StepExits\.on_step .* raised SystemExit: 0 \(handed_over\.py, line \d+\) at",
        ),
        (StepReturns(), r"returned an int at step 3; expected None"),
        (Writes(), r"raised TypeError"),
    ],
)
def test_one_that_fails_is_named(callback: Callback, said: str) -> None:
    with pytest.raises(ExtensionError, match=said):
        told(Callback(), callback).tell("on_step", {"loss": 1.0}, step=3)


def test_one_that_asks_for_the_end_is_named_on_all_ranks() -> None:
    """The others are told all the same."""
    heard = Heard()
    callbacks = told(Callback(), Stops(3), heard)
    callbacks.tell("on_step", step=2)
    assert callbacks.stopped_by is None
    callbacks.tell("on_step", step=3)
    assert callbacks.stopped_by == "callback Stops.on_step (callbacks[1])"
    assert [event.step for _, event in heard.events] == [2, 3]

    class Second(Ranks):
        def on_main(self, work: Any) -> Any:
            return "what the main rank found"

    other = told(StepRaises(), ranks=Second(rank=1))
    other.tell("on_step", step=3)
    assert other.stopped_by == "what the main rank found"


def test_behind_the_end_nothing_goes_on() -> None:
    class Uploads(Callback):
        def on_end(self, event: Event) -> None:
            raise OSError("no route")

    with pytest.raises(ExtensionError, match=r"at step 9\. The run is finished, and all that it"):
        told(Uploads()).tell("on_end", step=9)


def test_a_rank_without_callbacks_meets_the_main_rank() -> None:
    """The usual pattern is `callbacks=[...] if rank == 0 else []`."""

    class Second(Ranks):
        def on_main(self, work: Any) -> Any:
            met.append(work)

    met: list[Any] = []
    second = told(ranks=Second(rank=1))
    second.hooks = {"on_step"}
    second.tell("on_step")
    assert len(met) == 1


def test_what_is_no_callback_is_found_before_the_run() -> None:
    assert check_callbacks([Heard(), Callback()]) == []
    [typo] = check_callbacks([Typo()])
    assert typo == "callbacks[0] (Typo) has on_stpe; did you mean on_step?"
    [nothing] = check_callbacks([object()])
    assert "without any of on_step" in nothing
    [class_] = check_callbacks([Heard])
    assert "call it" in class_


def test_figures_of_any_depth_are_frozen() -> None:
    view = frozen({"a": [{"b": 1}]})
    assert view["a"][0]["b"] == 1 and HOOKS[0] == "on_step"
    with pytest.raises(TypeError):
        view["a"][0]["b"] = 2
