"""What a program hands to `vlmpack.finetune` in tests: right values, and a broken one of each kind.

    python handed_over.py RECIPE WHAT

finetunes a recipe with one of FAULTS, ENDS, ON_ONE_RANK or FIRST_RANK_ALONE; ranks run it.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from PIL import Image
from support.record_data import record
from support.shard_fakes import image_bytes

import vlmpack
from vlmpack.training.objective import Remark


class Records:
    """The records of `record_data`, their images as Pillow has them."""

    version = 1

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {**record(number), "images": self.images(number)}

    def images(self, number: int) -> list[Any]:
        seeds = range(number * 10, number * 10 + len(record(number)["images"]))
        files = [image_bytes(8 + number % 40, 20, seed=seed) for seed in seeds]
        return [Image.open(io.BytesIO(data)) for data in files]


class Raises(Records):
    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == 5:
            raise KeyError("no such picture")
        return super().__getitem__(number)


class Exits(Records):
    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == 5:
            sys.exit("enough")
        return super().__getitem__(number)


class Vanishes(Records):
    """Ends the loader process that asks it, in its own run's words."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == 5 and multiprocessing.parent_process() is not None:
            os._exit(0)
        return super().__getitem__(number)


class Nonsense(Records):
    def __getitem__(self, number: int) -> Any:
        return super().__getitem__(number) if number != 5 else 7


class Restless(Records):
    """Never the same twice."""

    asked = 0

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.asked += 1
        made = super().__getitem__(number)
        made["messages"][-1]["content"][0]["text"] += str(self.asked)
        return made


class NoLength(Records):
    def __len__(self) -> int:
        raise RuntimeError("nobody knows")


def asked(made: Mapping[str, Any]) -> dict[str, Any]:
    """As `swapped` wrote them -> as they were."""
    return {"messages": made["turns"], "images": made["pictures"], "id": made["id"]}


def swapped(made: Mapping[str, Any]) -> dict[str, Any]:
    """A record under keys of no layout."""
    return {"turns": made["messages"], "pictures": made["images"], "id": made["id"]}


def half(predictions: Any) -> float:
    return 0.5


def metric_raises(predictions: Any) -> float:
    return float(predictions[0].no_such_field)


def metric_lies(predictions: Any) -> float:
    return 1.5


def metric_exits(predictions: Any) -> float:
    sys.exit(0)


class Heard(vlmpack.Callback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, vlmpack.Event]] = []

    def on_step(self, event: vlmpack.Event) -> None:
        self.events.append(("step", event))

    def on_validation(self, event: vlmpack.Event) -> None:
        self.events.append(("validation", event))

    def on_answers(self, event: vlmpack.Event) -> None:
        self.events.append(("answers", event))

    def on_checkpoint(self, event: vlmpack.Event) -> None:
        self.events.append(("checkpoint", event))

    def on_end(self, event: vlmpack.Event) -> None:
        self.events.append(("end", event))


class Says(vlmpack.Callback):
    """Prints what it is told."""

    def on_step(self, event: vlmpack.Event) -> None:
        print(f"told of step {event.step}")

    def on_end(self, event: vlmpack.Event) -> None:
        print("told of the end")


class Slow(vlmpack.Callback):
    """Takes long over one step."""

    seconds = 8.0

    def on_step(self, event: vlmpack.Event) -> None:
        if event.step == 2:
            time.sleep(self.seconds)


class Typo(vlmpack.Callback):
    def on_stpe(self, event: vlmpack.Event) -> None: ...


class StepRaises(vlmpack.Callback):
    def on_step(self, event: vlmpack.Event) -> None:
        if event.step == 3:
            raise ZeroDivisionError("of my own")


class StepExits(vlmpack.Callback):
    def on_step(self, event: vlmpack.Event) -> None:
        if event.step == 3:
            sys.exit(0)


class Ends(vlmpack.Callback):
    """Ends the process, and says nothing."""

    def on_step(self, event: vlmpack.Event) -> None:
        if event.step == 2:
            os._exit(0)


class Forks(vlmpack.Callback):
    """Both processes come back from it."""

    def on_step(self, event: vlmpack.Event) -> None:
        if event.step == 2:
            os.fork()


class Stops(vlmpack.Callback):
    """Asks for the end of the run at one step."""

    def __init__(self, step: int = 2) -> None:
        self.step = step

    def on_step(self, event: vlmpack.Event) -> Any:
        return vlmpack.STOP if event.step == self.step else None


class StepReturns(vlmpack.Callback):
    def on_step(self, event: vlmpack.Event) -> None:
        return event.step  # type: ignore[return-value]


class Writes(vlmpack.Callback):
    def on_step(self, event: vlmpack.Event) -> None:
        event.figures["loss"] = 0.0  # type: ignore[index]


def bare(losses: Any, batch: Any) -> Any:
    return losses.sum()


def sums_raise(losses: Any, batch: Any) -> Any:
    raise ZeroDivisionError("of my own")


def sums_exit(losses: Any, batch: Any) -> Any:
    sys.exit(0)


def two_sums(losses: Any, batch: Any) -> Any:
    return {"loss_sum": losses.sum(), "other": losses.sum()}


def step_raises(data_iterator: Any, model: Any) -> Any:
    raise KeyError(next(data_iterator).keys[0])


def count_raises(batch: Any) -> int:
    return len(batch.no_such_field)


def one(batch: Any) -> int:
    return 1


def which_raises(batch: Any) -> Any:
    return batch.no_such_field


def of_sums(given: Any, **more: Any) -> vlmpack.Objective:
    return vlmpack.Objective(sums=given, **more)


REMARK = Remark(one="is mine", many="are mine", which=which_raises)


class OnOneRank:
    """An objective that raises where it is asked the fourth time, on the second rank alone."""

    asked = 0

    def __call__(self, losses: Any, batch: Any) -> Any:
        self.asked += 1
        if self.asked == 4 and os.environ["RANK"] == "1":
            raise ZeroDivisionError("of one rank's samples")
        return {"loss_sum": losses.sum()}


FAULTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "callback raises": (
        {"callbacks": [StepRaises()]},
        (
            "callback StepRaises.on_step (callbacks[0]) raised ZeroDivisionError: of my own",
            "the same call goes on from step 3, which is saved",
        ),
    ),
    "callback exits": (
        {"callbacks": [StepExits()]},
        (
            "callback StepExits.on_step (callbacks[0]) raised SystemExit: 0 (handed_over.py, line",
            "the same call goes on from step 3, which is saved",
        ),
    ),
    "metric exits": (
        {"metrics": {"mine": metric_exits}},
        ("metric python:mine raised SystemExit: 0 (handed_over.py, line",),
    ),
    "source exits": (
        {"sources": {"mine": Exits(12)}},
        ("python:mine[5] raised SystemExit: enough (handed_over.py, line",),
    ),
    "objective exits": (
        {"objective": sums_exit},
        ("objective sums_exit raised SystemExit: 0 (handed_over.py, line",),
    ),
    "callback returns": (
        {"callbacks": [vlmpack.Callback(), StepReturns()]},
        ("StepReturns.on_step (callbacks[1]) returned an int at step 1; expected None",),
    ),
    "callback writes": (
        {"callbacks": [Writes()]},
        ("Writes.on_step (callbacks[0]) raised TypeError", "item assignment"),
    ),
    "metric raises": (
        {"metrics": {"mine": metric_raises}},
        (
            "metric python:mine raised AttributeError",
            "no_such_field' (handed_over.py, line",
            "Mend it, or leave it out: the same call goes on with the run",
        ),
    ),
    "metric lies": (
        {"metrics": {"mine": metric_lies}},
        ("metric python:mine returned 1.5. Expected a share from 0 to 1",),
    ),
    "source raises": (
        {"sources": {"mine": Raises(12)}},
        ("python:mine[5] raised KeyError: 'no such picture' (handed_over.py, line",),
    ),
    "source returns": (
        {"sources": {"mine": Nonsense(12)}},
        ("python:mine[5] returned an int; expected a record, {'messages': [...]}",),
    ),
    "source is restless": (
        {"sources": {"mine": Restless(12)}},
        ("must return the same record each time; raise its `version`",),
    ),
    "source without length": (
        {"sources": {"mine": NoLength(12)}},
        ("python:mine: len() of it raised RuntimeError: nobody knows",),
    ),
    "objective returns": (
        {"objective": bare},
        ("objective bare returned a 0-d tensor; expected {'loss_sum': a 0-d tensor}",),
    ),
    "objective sums raise": (
        {"objective": of_sums(sums_raise)},
        ("objective.sums (sums_raise) raised ZeroDivisionError: of my own (handed_",),
    ),
    "objective sums others": (
        {"objective": of_sums(two_sums)},
        ("objective.sums (two_sums) returned {'loss_sum': a 0-d tensor, 'other': a 0-d tensor};",),
    ),
    "objective step raises": (
        {"objective": vlmpack.Objective(forward_step=step_raises)},
        ("objective.forward_step (step_raises) raised KeyError", "handed_over.py, line"),
    ),
    "objective count raises": (
        {"objective": vlmpack.Objective(counts={"mine": count_raises})},
        ("objective.counts['mine'] raised AttributeError", "no_such_field"),
    ),
    "objective remark raises": (
        {"objective": vlmpack.Objective(counts={"mine": one}, remarks={"mine": REMARK})},
        ("objective.remarks['mine'].which raised AttributeError", "no_such_field"),
    ),
}
"""What is handed over -> what the run must say."""
ENDS: dict[str, dict[str, Any]] = {
    "callback ends": {"callbacks": [Ends()]},
    "callback forks": {"callbacks": [Forks()]},
}
"""What Python hears nothing of."""
ON_ONE_RANK: dict[str, dict[str, Any]] = {"objective raises": {"objective": OnOneRank()}}
"""What fails on one rank alone."""
FIRST_RANK_ALONE: dict[str, dict[str, Any]] = {
    "callbacks alone": {"callbacks": [Says()]},
    "objective alone": {"objective": OnOneRank()},
    "stopping callback": {"callbacks": [Stops()]},
    "slow callback": {"callbacks": [Slow()]},
    "typo alone": {"callbacks": [Typo()]},
}
"""What is handed over on the main rank, and nothing on the others."""


def main(recipe: str, what: str) -> None:
    try:
        if what in FIRST_RANK_ALONE:
            given = FIRST_RANK_ALONE[what] if os.environ["RANK"] == "0" else {}
        else:
            given = ON_ONE_RANK.get(what) or ENDS.get(what) or FAULTS[what][0]
        vlmpack.finetune(recipe, **given)
    except vlmpack.VlmpackError as error:
        sys.exit(f"ended by {type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
