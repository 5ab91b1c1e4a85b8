"""What a program is told while its run goes on: steps, validations, checkpoints, the end.

    class Curve(vlmpack.Callback):
        losses = []

        def on_step(self, event):
            self.losses.append(event.figures["loss"])

    vlmpack.finetune("recipe.yaml", callbacks=[Curve()])

Callbacks look, and change nothing. They are called on the main rank, once the files of the event
are on disk. One that returns `vlmpack.STOP` ends the run as its last step would. One that raises
ends the run on all ranks. The error names it, and the step is saved first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vlmpack.activity import ACTIVITY
from vlmpack.distributed import Ranks
from vlmpack.distributed.ranks import CollectiveTimeouts
from vlmpack.errors import ExtensionError
from vlmpack.handed_over import calling
from vlmpack.training.listener import Listener, TrainStep
from vlmpack.words import kind_of, raised, unfit_signature


class Stop(Enum):
    """What a callback may return; equal in every process."""

    STOP = "stop"


STOP = Stop.STOP
"""Ends the run: the step is saved, and evaluation, export and result.json follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a callback gets, read-only.

    Args:
        figures: read-only. In `on_step` the row of metrics.jsonl, in `on_validation`
            `validation_loss` and the other figures of validation. In `on_answers` the metrics of
            the answers to the test questions, by name. In `on_end` result.json, in
            `on_checkpoint` nothing.
        folder: in `on_checkpoint` the checkpoint, whole and verified.
    """

    step: int
    total_steps: int
    run_dir: Path
    figures: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None


class Callback:
    """Subclass it and write the methods that you need; each returns None, or STOP."""

    def on_step(self, event: Event) -> Stop | None:
        """An optimizer step was taken."""

    def on_validation(self, event: Event) -> Stop | None:
        """The validation loss was computed."""

    def on_answers(self, event: Event) -> Stop | None:
        """The test questions were answered and scored."""

    def on_checkpoint(self, event: Event) -> Stop | None:
        """A checkpoint was written whole."""

    def on_end(self, event: Event) -> Stop | None:
        """The run is at its end: export and result.json are written."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


@dataclass(slots=True, kw_only=True)
class Callbacks(Listener):
    """The callbacks of a run, on one rank.

    Args:
        callbacks: in the order of their calls; used on the main rank alone.
        hooks: that any of them has; the same on all ranks, since a call is collective.
        timeouts: how long the other ranks wait for the main one.
        stopped_by: the callback that asked for the end of the run.
    """

    callbacks: Sequence[object]
    hooks: Collection[str]
    ranks: Ranks
    timeouts: CollectiveTimeouts
    run_dir: Path
    total_steps: int
    step: int = 0
    stopped_by: str | None = None

    def on_step(self, step: TrainStep) -> None:
        self.step = step.step
        self.tell("on_step", step.row)

    def on_saved(self, step: int, folder: Path) -> None:
        self.tell("on_checkpoint", step=step, folder=folder)

    def state(self) -> Mapping[str, Any]:
        """Who stopped the run, and at which length; a longer run continues."""
        return {"stopped": self.stopped_by and (self.stopped_by, self.total_steps)}

    def resume(self, state: Mapping[str, Any]) -> None:
        self.step = state["totals"]["step"]
        callback, of_steps = state["stopped"] or (None, None)
        self.stopped_by = callback if of_steps == self.total_steps else None

    def mute(self) -> None:
        """Tell nothing any more, on any rank."""
        self.hooks = ()

    def tell(
        self,
        hook: str,
        figures: Mapping[str, Any] = MappingProxyType({}),
        *,
        step: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """Call a hook of all callbacks that have it. Collective if any has.

        The other ranks wait for the main one.

        Args:
            figures: of the main rank. Those of other ranks are ignored.
            step: optimizer steps taken, if other than at this moment.

        Raises:
            ExtensionError: on all ranks, if one raises or returns a wrong value.
        """
        if hook not in self.hooks:
            return
        event = Event(
            step=self.step if step is None else step,
            total_steps=self.total_steps,
            run_dir=self.run_dir,
            figures=frozen(figures),
            folder=folder,
        )
        with ACTIVITY.during(f"callbacks: {hook}", ()), self.timeouts.of_callbacks():
            asks = self.ranks.on_main(lambda: self._tell(hook, event))
        if self.step < self.total_steps:
            self.stopped_by = self.stopped_by or asks

    def _tell(self, hook: str, event: Event) -> str | None:
        asks: str | None = None
        for place, one in enumerate(self.callbacks):
            call = _hook(one, hook)
            if call is None:
                continue
            named = f"callback {type(one).__name__}.{hook} (callbacks[{place}])"
            with calling(named, partial(_fault, named, hook, event.step)):
                returned = call(event)
            if returned is STOP:
                asks = asks or named
            elif returned is not None:
                raise ExtensionError(
                    f"{named} returned {kind_of(returned)} at step {event.step}; expected None, or "
                    "vlmpack.STOP to end the run: callbacks look, and change nothing"
                    f"{_behind(hook)}"
                )
        return asks


def _fault(named: str, hook: str, step: int, error: BaseException) -> ExtensionError:
    return ExtensionError(f"{named} {raised(error)} at step {step}{_behind(hook)}")


def _behind(hook: str) -> str:
    """What remains of the run after a fault in `on_end`; empty for other hooks."""
    if hook != "on_end":
        return ""
    return ". The run is finished, and all that it leaves is whole; another call tells no end"


def hooks_of(callbacks: Sequence[object]) -> frozenset[str]:
    return frozenset(
        hook for hook in HOOKS if any(_hook(one, hook) is not None for one in callbacks)
    )


def check_callbacks(callbacks: Sequence[object]) -> list[str]:
    if not isinstance(callbacks, list | tuple):
        return [f"callbacks is {kind_of(callbacks)}; expected a list of callbacks"]
    problems = []
    for place, one in enumerate(callbacks):
        where = f"callbacks[{place}]"
        if isinstance(one, type):
            problems.append(f"{where} is the class {one.__name__}; expected an object: call it")
            continue
        hooks = [name for name in dir(one) if name.startswith("on_")]
        if not hooks:
            problems.append(
                f"{where} is {kind_of(one)} without any of {', '.join(HOOKS)}; expected a "
                "vlmpack.Callback"
            )
        for name in hooks:
            if name not in HOOKS:
                near = get_close_matches(name, HOOKS, 1)
                meant = f"did you mean {near[0]}?" if near else f"known: {', '.join(HOOKS)}"
                problems.append(f"{where} ({type(one).__name__}) has {name}; {meant}")
            elif not callable(getattr(one, name)):
                problems.append(f"{where} ({type(one).__name__}): {name} cannot be called")
            elif unfit := unfit_signature(getattr(one, name), 1):
                problems.append(
                    f"{where} ({type(one).__name__}): {name} takes {unfit}; expected one argument, "
                    "the event"
                )
    return problems


def frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return MappingProxyType({key: frozen(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(frozen(item) for item in value)
    return value


def _hook(callback: object, hook: str) -> Callable[[Event], object] | None:
    """A callback's own hook, of its class or set on the object."""
    method: Callable[[Event], object] | None = getattr(callback, hook, None)
    return None if getattr(method, "__func__", None) is getattr(Callback, hook) else method
