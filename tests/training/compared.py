"""Run in ranks: recipes one after the other, each with a fault in one rank after its third step.

    torchrun --nproc-per-node N compared.py RECIPE:FAULT:WHAT ...

FAULT is `flip` (an exponent bit of the first part whose name begins with WHAT), a name of `FAULTS`,
or nothing; `off` flips too, with the comparison off. Writes RECIPE.<rank>.json: the error that the
run ended with, and what was logged.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from support.replica_runs import stay

from vlmpack.api import resolve, run_recipe
from vlmpack.distributed import ranks, start_process_group
from vlmpack.errors import VlmpackError
from vlmpack.training.replicas import Replicas
from vlmpack.training.step import Stepper

HIT = 1
AFTER = 3
"""Steps; every second one is saved."""


def flip(stepper: Stepper, what: str) -> None:
    """Multiply or divide one element by 2 ** 8."""
    parts = stepper.engine.held_parts()
    values = next(values for name, values in parts if name.startswith(what))
    with torch.no_grad():
        values.view(torch.int32).view(-1)[:1] ^= 1 << 26


def seed(stepper: Stepper, what: str) -> None:
    """Draw dropout as replica 0 does."""
    stepper.ranks = replace(stepper.ranks, dp_rank=0)


def learning_rate(stepper: Stepper, what: str) -> None:
    """Have another one."""
    usual = stepper.schedule
    stepper.schedule = lambda step: 0.99 * usual(step)  # type: ignore[assignment]


FAULTS = {"flip": flip, "off": flip, "seed": seed, "learning rate": learning_rate}


class Faulty:
    """`Stepper.train`, and the fault after it."""

    def __init__(self, fault: str, what: str) -> None:
        self.fault, self.what, self.train = FAULTS.get(fault), what, Stepper.train

    def __get__(self, stepper: Stepper, _: type) -> Any:
        def train(step: int, *of: Any, **more: Any) -> Any:
            done = self.train(stepper, step, *of, **more)
            if self.fault and step + 1 == AFTER and stepper.ranks.rank == HIT:
                self.fault(stepper, self.what)
            return done

        return train


def moved(self: Replicas, step: Any) -> None:
    """A rank that believes to stand one batch further."""
    data = step.data
    if step.step > AFTER and self.stepper.ranks.rank == HIT:
        data = replace(data, state=replace(data.state, batch=data.state.batch + 1))
    ON_STEP(self, replace(step, data=data))


ON_STEP = Replicas.on_step


def run(recipe: Path, fault: str, what: str) -> None:
    """One recipe; what came of it."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vlmpack")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    found: list[str | None] = [None, None]
    with (
        patch.object(Stepper, "train", Faulty(fault, what)),
        patch.object(Replicas, "on_step", moved if fault == "position" else ON_STEP),
        patch.object(Replicas, "_compare", (lambda self: 0) if fault == "off" else COMPARE),
    ):
        try:
            run_recipe(resolve(json.loads(recipe.read_text()), {}))
        except VlmpackError as error:
            found = [type(error).__name__, str(error)]
    logger.removeHandler(handler)
    logged = [line for line in said if line.startswith("replicas")]
    place = recipe.with_suffix(f".{os.environ['RANK']}.json")
    place.write_text(json.dumps({"error": found, "said": logged}))


COMPARE = Replicas._compare


def main(jobs: list[str]) -> None:
    """All of them, in the same processes."""
    start_process_group()
    leave, ranks.stop_process_group = ranks.stop_process_group, stay
    for job in jobs:
        recipe, fault, what = job.split(":")
        run(Path(recipe), fault, what)
    leave()


if __name__ == "__main__":
    main(sys.argv[1:])
