"""Engines and steppers on the tiny model, one CPU process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vlmpack.backends.adamw import AdamWConfig
from vlmpack.backends.hf.engine import HFEngine, HFEngineConfig
from vlmpack.distributed import Ranks
from vlmpack.families import Encoder
from vlmpack.training.optim import Schedule
from vlmpack.training.step import Stepper

ADAMW = AdamWConfig(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
"""The defaults of a recipe."""


def single_rank() -> Ranks:
    """A single process on CPU."""
    return Ranks(
        rank=0, world_size=1, local_rank=0, dp_rank=0, dp_size=1, device=torch.device("cpu")
    )


def make_engine(
    folder: Path, encoder: Encoder, *, ranks: Ranks | None = None, **options: Any
) -> HFEngine:
    """A float32 engine with the per-segment attention and the defaults of a recipe's AdamW."""
    config = HFEngineConfig(folder=folder, dtype="float32", attention="segments", **options)
    return HFEngine(config, encoder, ranks if ranks is not None else single_rank(), ADAMW)


def make_stepper(engine: HFEngine, *, max_grad_norm: float | None = 1.0) -> Stepper:
    """A constant learning rate.

    AdamW's first steps are nearly the sign of the gradient: an element whose gradient is nothing
    but rounding moves by the learning rate, one way or the other. The rate is small so that what
    this does to later steps stays below the bound of 1e-5 that is about the gradients themselves.
    """
    schedule = Schedule(peak=2e-4, floor=2e-4, warmup_steps=0, total_steps=100, kind="constant")
    return Stepper(
        engine=engine,
        schedule=schedule,
        max_grad_norm=max_grad_norm,
        ranks=engine.ranks,
    )
