"""Run in ranks: `vlmpack verify` on the Megatron engine, one parallel layout after another.

    torchrun --nproc-per-node 2 verify_layouts.py RECIPE FOLDER JOB [JOB ...]

A job is a name of `JOBS`; it writes FOLDER/<job>/verify.json.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from backends.mcore.hybrid_layouts import whole
from support.layouts import Layout, one_layout
from torch import Tensor

from vlmpack.backends.mcore.mixers import PackedGatedDeltaNet
from vlmpack.distributed import stop_process_group
from vlmpack.proof.verify import VerifyOptions, verify_recipe
from vlmpack.proof.verify.run import write_verification
from vlmpack.recipe import load_recipe
from vlmpack.recurrence import segment_delta_rule


def over_the_row(lengths: Any, *, rank: int, size: int) -> Tensor:
    """Zigzag over the whole stream instead of per sequence."""
    chunks = torch.arange(sum(lengths)).chunk(2 * size)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


def cut_over_the_row() -> AbstractContextManager[Any]:
    """The fault."""
    return patch("vlmpack.packing.context.zigzag_index", over_the_row)


def state_runs_on() -> AbstractContextManager[Any]:
    """A delta rule that takes all samples of a row for one: what it is told is right."""

    @wraps(segment_delta_rule)
    def running_on(*args: Any, **options: Any) -> Tensor:
        *given, row = args
        return segment_delta_rule(*given, whole(row), **options)

    return patch.dict("vlmpack.recurrence.choose.FORMS", delta_rule=running_on)


def told_no_boundary() -> AbstractContextManager[Any]:
    """Layers that are handed a row of one segment."""
    mixed = PackedGatedDeltaNet._mixed

    def untold(self: Any, mixers: Any, row: Any) -> Tensor:
        return mixed(self, mixers, whole(row))

    return patch.object(PackedGatedDeltaNet, "_mixed", untold)


JOBS: dict[str, tuple[Layout, Any]] = {
    "tp2": (Layout(tensor=2, sequence=True), nullcontext),
    "cp2": (Layout(context=2), nullcontext),
    "pp2": (Layout(pipeline=2), nullcontext),
    "cp2-over-the-row": (Layout(context=2), cut_over_the_row),
    "cp2-state-runs-on": (Layout(context=2), state_runs_on),
    "cp2-told-no-boundary": (Layout(context=2), told_no_boundary),
}


def main(recipe: str, folder: Path, jobs: list[str]) -> None:
    """One job after another."""
    for job in jobs:
        layout, fault = JOBS[job]
        loaded = load_recipe(
            recipe,
            {
                "model.backend": "mcore",
                "parallelism.tensor": layout.tensor,
                "parallelism.context": layout.context,
                "parallelism.pipeline": layout.pipeline,
                "parallelism.sequence": layout.sequence,
            },
        )
        with one_layout(layout) as ranks, fault():
            found = verify_recipe(loaded, ranks, VerifyOptions(num_samples=3))
            ranks.on_main(lambda found=found, job=job: write_verification(found, folder / job))
    stop_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
