"""`make soak-flips`: bits flipped in the memory of a single replica, and which of them spikes find.

    PYTHONPATH=.:tests python -m faults.flips --draws 300

The digits demo is trained to step 120. Each draw then goes back to step 100, flips one bit there
and trains the 20 steps again. Nothing else differs, so the same without a flip says what one did.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from support.shards import ROOT

from vlmpack.api import run_recipe
from vlmpack.errors import VlmpackError
from vlmpack.recipe import load_recipe
from vlmpack.training import reporting
from vlmpack.training.listener import TrainStep
from vlmpack.training.reporting import Spikes
from vlmpack.training.step import Stepper, StepSums

BEFORE, AFTER = 100, 20
"""Steps until the flip, and from then on."""
HARM = 0.01
"""A flip does harm from such a relative difference of a loss on."""
PARTS = ("weight", "moment")
BITS = {"sign": (31,), "exponent": range(23, 31), "mantissa": range(23)}
QUIET: dict[str, Any] = {
    "training.max_steps": BEFORE + AFTER,
    "data.num_workers": 0,
    "evaluation.generate": False,
    "evaluation.interval_steps": None,
    "checkpoint.interval_steps": None,
    "export.enabled": False,
    "logging.progress": "none",
    "logging.trackers": [],
    "training.on_non_finite": "stop",
}


def flip(stepper: Stepper, draw: random.Random, part: str, bit: int) -> str:
    """Flip a bit of one element; each element of all weights, or of all moments, is as likely."""
    engine: Any = stepper.engine
    weights = {name for name, _ in engine.vlm.model.named_parameters()}
    held = [
        (name, values)
        for name, values in engine.held_parts()
        if (name in weights if part == "weight" else " of " in name)
    ]
    assert held and all(values.dtype == torch.float32 for _, values in held)
    name: str
    name, values = draw.choices(held, [values.numel() for _, values in held])[0]
    place = draw.randrange(values.numel())
    with torch.no_grad():
        mask = 1 << bit if bit < 31 else -(1 << 31)
        values.view(torch.int32).view(-1)[place : place + 1] ^= mask
    return name


class Recorder:
    """`Stepper.train`, which keeps its calls from step BEFORE on and the state before them."""

    def __init__(self) -> None:
        self.train = Stepper.train
        self.calls: list[tuple[int, Any, Any]] = []
        self.figures: list[StepSums] = []

    def __get__(self, stepper: Stepper, _: type) -> Callable[..., Any]:
        def train(step: int, *of: Any, **more: Any) -> Any:
            if step == BEFORE:
                self.stepper = stepper
                self.state = deepcopy(self._held())
            if step >= BEFORE:
                self.calls.append((step, of, more))
            done = self.train(stepper, step, *of, **more)
            self.figures.append(done[0])
            return done

        return train

    def _held(self) -> tuple[Any, Any]:
        engine: Any = self.stepper.engine
        return engine.vlm.model.state_dict(), engine.optimizer.state_dict()

    def again(self, harm: Callable[[Stepper], str] | None) -> dict[str, Any]:
        """Train the kept steps with something done before them: what found it, and the losses."""
        engine: Any = self.stepper.engine
        weights, moments = deepcopy(self.state)
        engine.vlm.model.load_state_dict(weights)
        engine.optimizer.load_state_dict(moments)
        spikes, found = Spikes(self.stepper.ranks), ""
        losses: list[float | None] = []
        for name, window in spikes.windows.items():
            window.extend(getattr(sums, name) for sums in self.figures[:BEFORE])
        name = "" if harm is None else harm(self.stepper)
        for step, of, more in self.calls:
            try:
                sums, _ = self.train(self.stepper, step, *of, **more)
            except VlmpackError as error:
                return {"name": name, "found_by": type(error).__name__, "losses": losses}
            losses.append(sums.loss)
            found = found or self._spike(spikes, step, sums)
        return {"name": name, "found_by": found, "losses": losses}

    @staticmethod
    def _spike(spikes: Spikes, step: int, sums: StepSums) -> str:
        names = SimpleNamespace(names=[["a"]])
        with patch.object(reporting.logger, "warning") as said:
            spikes.on_step(cast(TrainStep, SimpleNamespace(step=step + 1, sums=sums, data=names)))
        return "spike" if said.called else ""


def drawn(count: int, seed: int) -> Iterator[tuple[str, int]]:
    """Kinds of bits and parts in turn."""
    draw = random.Random(seed)
    for number in range(count):
        kind = [*BITS][number % len(BITS)]
        yield PARTS[number // len(BITS) % len(PARTS)], draw.choice(BITS[kind])


def shares(outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many flips of each kind did harm, and how many of them were found."""
    clean, *flipped = outcomes
    assert clean["bit"] is None and not clean["found_by"], "the unharmed run has a spike"
    rows = []
    for part in PARTS:
        for kind, bits in BITS.items():
            own = [each for each in flipped if each["part"] == part and each["bit"] in bits]
            harmed = [each for each in own if is_harmed(each, clean)]
            by = [each["found_by"] for each in harmed]
            rows.append(
                {
                    "part": part,
                    "bit": kind,
                    "flips": len(own),
                    "harmed": len(harmed),
                    "spike": by.count("spike"),
                    "not finite": len(by) - by.count("spike") - by.count(""),
                    "false": sum(bool(each["found_by"]) for each in own) - len(by) + by.count(""),
                }
            )
    return rows


def is_harmed(one: dict[str, Any], clean: dict[str, Any]) -> bool:
    """Whether a loss of the 20 steps is off, or the run ended before."""
    if len(one["losses"]) < len(clean["losses"]):
        return True
    pairs = zip(one["losses"], clean["losses"], strict=True)
    return any(not abs(ours / theirs - 1) < HARM for ours, theirs in pairs)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/flips.json")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    recorder, draw = Recorder(), random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder, patch.object(Stepper, "train", recorder):
        recipe = ROOT / "recipes/digits-demo.yaml"
        run_recipe(load_recipe(recipe, QUIET | {"run_dir": folder}))
    outcomes = [recorder.again(None) | {"part": "", "bit": None}]
    assert outcomes[0]["losses"] == [sums.loss for sums in recorder.figures[BEFORE:]]
    for part, bit in drawn(given.draws, given.seed):
        done = recorder.again(partial(flip, draw=draw, part=part, bit=bit))
        outcomes.append(done | {"part": part, "bit": bit})
    made = {"date": time.strftime("%Y-%m-%d"), "machine": f"{os.cpu_count()} cores"}
    rows = shares(outcomes)
    given.results.write_text(json.dumps({**made, "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
