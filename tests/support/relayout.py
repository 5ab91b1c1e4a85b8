"""Run under torchrun: checkpoints that one layout writes and another goes on from.

    torchrun --nproc-per-node N relayout.py save FOLDER LAYOUT
    torchrun --nproc-per-node N relayout.py resume FOLDER LAYOUT FROM[,FROM ...]

LAYOUT is one of `layouts.LAYOUTS`, or hf for the other engine in one process. `save` takes a few
steps, saves FOLDER/LAYOUT and takes `layouts.STEPS` more; `resume` loads FOLDER/FROM and takes as
many. Both write their losses and gradient norms to FOLDER/<layout>-from-<from>.json.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.checkpoints import save_engine
from support.engines import make_engine, make_stepper
from support.layouts import LAYOUTS, STEPS, Layout, make_megatron, train
from support.shards import TINY_MODEL

from vlmpack.distributed import Ranks, start_process_group, stop_process_group
from vlmpack.families import Encoder
from vlmpack.training.checkpoint import load_checkpoint, step_folder
from vlmpack.training.step import Stepper

STEPS_BEFORE = 3


def layout_of(name: str) -> Layout:
    """By name; the hf engine is laid out as one process."""
    return LAYOUTS["one" if name == "hf" else name]


def stepper_of(name: str, ranks: Ranks) -> Stepper:
    """An engine on the pretrained weights; Megatron's optimizer is sharded."""
    engine: Any
    if name == "hf":
        engine = make_engine(TINY_MODEL, Encoder(TINY_MODEL), ranks=ranks)
    else:
        engine = make_megatron(replace(layout_of(name), distributed=True), ranks)
    return make_stepper(engine)


def main(mode: str, folder: Path, name: str, sources: str) -> None:
    """Save, or resume from each source in turn."""
    layout = layout_of(name)
    ranks = start_process_group(
        tensor=layout.tensor, context=layout.context, pipeline=layout.pipeline
    )
    for source in sources.split(","):
        stepper = stepper_of(name, ranks)
        if mode == "save":
            train(stepper, layout, STEPS_BEFORE)
            save_engine(folder / name, STEPS_BEFORE, stepper.engine, keep=1, ranks=ranks)
        else:
            load_checkpoint(step_folder(folder / source, STEPS_BEFORE), stepper.engine, ranks)
            assert stepper.engine.optimizer_steps == STEPS_BEFORE
        rows = train(stepper, layout, STEPS)
        if ranks.is_main:
            (folder / f"{name}-from-{source}.json").write_text(json.dumps(rows))
    stop_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], (*sys.argv[4:], sys.argv[3])[0])
