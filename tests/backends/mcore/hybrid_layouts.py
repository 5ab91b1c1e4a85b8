"""Run in ranks: models with layers that carry state on the Megatron engine, in parallel layouts.

    torchrun --nproc-per-node N hybrid_layouts.py FOLDER JOB [JOB ...]

As `family_layouts.py`, with checkpoints from which other layouts go on, and with known ways to be
wrong: a job `NAME:FAMILY:LAYOUT`, NAME one of `CONTROLS`, is one step of SGD with that fault.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from backends.mcore import family_layouts
from backends.mcore.family_layouts import STEPS_AFTER, STEPS_BEFORE, Job, stem_of
from support import layouts
from support.engines import make_stepper
from support.layouts import Layout
from torch import Tensor

from vlmpack.backends.mcore.mixers import SUMMED_OVER_TP, PackedMamba2, PackedMixer
from vlmpack.backends.mcore.router import biased_routers
from vlmpack.distributed import stop_process_group
from vlmpack.recurrence import RowSegments
from vlmpack.training.checkpoint import load_checkpoint, step_folder

LAYOUTS = family_layouts.FAMILY_LAYOUTS | {
    "tp2-selective": Layout(tensor=2, sequence=True, recompute="selective"),
    "tp2-cp2": Layout(tensor=2, context=2, sequence=True, recompute="full"),
    "tp2-pp2": Layout(tensor=2, pipeline=2, distributed=True),
    "tp2-pp2-sp": Layout(tensor=2, pipeline=2, sequence=True, distributed=True),
    "cp2-pp2": Layout(context=2, pipeline=2, distributed=True),
    **{name: layouts.LAYOUTS[name] for name in ("tp2-captured", "dp2-captured")},
}

SAVED = "tp2"
"""The layout whose checkpoint others go on from."""


def mixers(engine: Any) -> list[Any]:
    """The layers that carry state of this stage."""
    return [part for part in engine.model.modules() if isinstance(part, PackedMixer)]


def cut(row: RowSegments, chunks: int) -> RowSegments:
    """Each segment in as many pieces."""
    lengths = tuple(n // chunks for n in row.lengths for _ in range(chunks))
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return RowSegments(lengths, ends)


def whole(row: RowSegments) -> RowSegments:
    """One segment of all."""
    return RowSegments((row.width,), torch.tensor([0, row.width], dtype=torch.int32))


def told(engine: Any, kind: str, other: Callable[[RowSegments], RowSegments]) -> None:
    """Let a recurrence have other segments; `state` is what carries it."""
    for mixer in mixers(engine):
        if kind == "state":
            kind = "scan" if isinstance(mixer, PackedMamba2) else "delta_rule"
        chosen = getattr(mixer.choice, kind)

        def wrong(*args: Any, of: Any = chosen.function, **options: Any) -> Tensor:
            *given, row = args
            return of(*given, other(row), **options)

        mixer.choice = replace(mixer.choice, **{kind: replace(chosen, function=wrong)})


def unsummed(engine: Any) -> None:
    """Each TP rank keeps the gradients of its own heads."""
    for mixer in mixers(engine):
        delattr(mixer.out_norm.weight, SUMMED_OVER_TP)
    engine.stage.find_gradients_over_tp()


def first_heads(engine: Any) -> None:
    """All CP ranks use the first one's filters and decays."""
    for mixer in mixers(engine):
        mixer._own_heads = partial(_of_the_first, mixer)


def _of_the_first(mixer: Any) -> Any:
    """What the first CP rank has."""
    group = mixer.cp_group
    mixer.cp_group = SimpleNamespace(size=group.size, rank=lambda: 0)
    try:
        return PackedMixer._own_heads(mixer)
    finally:
        mixer.cp_group = group


def unbiased(engine: Any) -> None:
    """Experts are chosen without their bias."""
    for _, router in biased_routers(engine.model.gpt.decoder.layers):
        assert router.expert_bias.any()
        router.expert_bias.zero_()


CONTROLS: dict[str, Callable[[Any], None]] = {
    "state lost between chunks": lambda engine: told(engine, "state", partial(cut, chunks=4)),
    "taps lost between chunks": lambda engine: told(engine, "convolution", partial(cut, chunks=4)),
    "state runs on": lambda engine: told(engine, "state", whole),
    "taps run on": lambda engine: told(engine, "convolution", whole),
    "norm without a sum": unsummed,
    "heads of the first rank": first_heads,
    "no bias": unbiased,
}


def do_resume(job: Job) -> None:
    """From the checkpoint of `SAVED`."""
    stepper = make_stepper(job.engine())
    saved = stem_of(job.folder, f"save:{job.family}:{SAVED}")
    load_checkpoint(step_folder(saved, STEPS_BEFORE), stepper.engine, job.ranks)
    rows = layouts.train(stepper, job.layout, STEPS_AFTER, job.model)
    if job.ranks.is_main:
        job.stem.with_suffix(".json").write_text(json.dumps(rows), encoding="utf-8")


def do_twin(job: Job) -> None:
    """One step of SGD without a fault."""
    job.train_and_save(job.engine(), "sgd", steps=1)


def do_broken(job: Job) -> None:
    """The same with one."""
    engine = job.engine()
    CONTROLS[job.text.partition(":")[0]](engine)
    job.train_and_save(engine, "sgd", steps=1)


JOBS = family_layouts.JOBS | {
    "resume": do_resume,
    "twin": do_twin,
    **dict.fromkeys(CONTROLS, do_broken),
}


def main(folder: Path, texts: list[str]) -> None:
    """One job after another."""
    for text in texts:
        kind, family, name = text.split(":")
        layout = LAYOUTS[name]
        family_layouts.FAMILY_LAYOUTS[name] = layout
        with layouts.one_layout(layout) as ranks:
            JOBS[kind](Job(text, folder, family, name, ranks))
    stop_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
