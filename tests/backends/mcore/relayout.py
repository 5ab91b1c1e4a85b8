"""Run in ranks: checkpoints that one layout writes and another goes on from.

    torchrun --nproc-per-node N relayout.py FOLDER JOB [JOB ...]

A job is `save:LAYOUT` or `resume:LAYOUT:SOURCE`, of one of `layouts.LAYOUTS` with N processes; of
the tiny model, or where they are LAYOUT@FAMILY, of FOLDER/FAMILY.
`save` takes a few steps, saves FOLDER/LAYOUT and takes `layouts.STEPS` more; `resume` loads what
SOURCE saved and takes as many; `forget` is a `resume` that goes on without the moments. Losses and
gradient norms of these steps are written to FOLDER/<job>.json, with hyphens for its colons.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.checkpoints import save_engine
from support.engines import make_stepper
from support.layouts import LAYOUTS, STEPS, Layout, make_megatron, one_layout, train
from support.shards import TINY_MODEL

from vlmpack.distributed import Ranks, stop_process_group
from vlmpack.training.checkpoint import load_checkpoint, step_folder
from vlmpack.training.step import Stepper

STEPS_BEFORE = 3


def file_of(folder: Path, job: str) -> Path:
    """Where a job's losses and gradient norms are."""
    return folder / f"{job.replace(':', '-')}.json"


def model_of(folder: Path, name: str) -> Path:
    """The model folder of a layout, by what is behind its `@`."""
    family = name.partition("@")[2]
    return folder / family if family else TINY_MODEL


def run_job(folder: Path, job: str, stepper: Stepper, layout: Layout, ranks: Ranks) -> None:
    """Save, or resume, on an engine with the pretrained weights."""
    action, name, *source = job.split(":")
    model = model_of(folder, name)
    if action == "save":
        train(stepper, layout, STEPS_BEFORE, model)
        save_engine(folder / name, STEPS_BEFORE, stepper.engine, keep=1, ranks=ranks)
    else:
        load_checkpoint(step_folder(folder / source[0], STEPS_BEFORE), stepper.engine, ranks)
        assert stepper.engine.optimizer_steps == STEPS_BEFORE
        if action == "forget":
            _forget_moments(stepper.engine)
    rows = train(stepper, layout, STEPS, model)
    if ranks.is_main:
        file_of(folder, job).write_text(json.dumps(rows))


def _forget_moments(engine: Any) -> None:
    """As a checkpoint of weights alone would be gone on from."""
    states = [state for part in engine.optimizer.parts for state in part.optimizer.state.values()]
    for state in states:
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()
    assert states


def main(folder: Path, jobs: list[str]) -> None:
    """One job after another; Megatron's optimizer is sharded."""
    for job in jobs:
        name = job.split(":")[1]
        layout = LAYOUTS[name.partition("@")[0]]
        with one_layout(layout) as ranks:
            sharded = replace(layout, distributed=True)
            stepper = make_stepper(make_megatron(sharded, ranks, model_of(folder, name)))
            run_job(folder, job, stepper, layout, ranks)
    stop_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
