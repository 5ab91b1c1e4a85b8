"""Engines and steppers on the tiny model, one CPU process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.runs import relative_l2
from torch import Tensor

from vlmpack.backends.hf.engine import HFEngine
from vlmpack.backends.policy import (
    TrainingPolicy,
)
from vlmpack.build.engine import resolved_compute
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.packing import Batch
from vlmpack.recipe.schema import ModelSection, ParallelismSection, Recomputed
from vlmpack.recipe.trainable import LoraSection, Mode, OptimSection, TrainableSection
from vlmpack.training.objective import SFT, Objective
from vlmpack.training.step import Schedule, Stepper, TrainabilityCheck

ADAMW = OptimSection(lr=2e-4, schedule="constant", weight_decay=0.01)
"""AdamW with a little decay; betas and eps are those of a recipe that leaves them out."""

EVERYTHING = TrainingPolicy(trainable=TrainableSection(), optim=ADAMW)
"""Every weight is trained, at the learning rate of the schedule."""


def single_rank() -> Ranks:
    """A single process on CPU."""
    return Ranks()


def engine_of(
    model: ModelSection,
    split: ParallelismSection,
    encoder: Encoder,
    ranks: Ranks,
    policy: TrainingPolicy,
    *,
    captures: bool = False,
) -> Any:
    """The engine that the section names, with what its dtype and attention are on the device."""
    parts = (model, split, encoder, ranks, policy)
    compute = resolved_compute(model, split, encoder, ranks.device, captures=captures)
    if model.backend == "hf":
        return HFEngine(*parts, compute)
    from vlmpack.backends.mcore.engine import MegatronEngine

    return MegatronEngine(*parts, compute)


def make_engine(
    folder: Path,
    encoder: Encoder,
    *,
    ranks: Ranks | None = None,
    policy: TrainingPolicy = EVERYTHING,
    activation_checkpointing: Recomputed = "none",
    aux_loss: float = 0.0,
    recurrence: Any = "auto",
    **split: Any,
) -> HFEngine:
    """A float32 engine with the per-segment attention and the defaults of a recipe's AdamW."""
    model = ModelSection(
        path=str(folder),
        dtype="float32",
        attention="segments",
        activation_checkpointing=activation_checkpointing,
        router_aux_loss_coef=aux_loss,
        recurrence=recurrence,
    )
    ranks = ranks if ranks is not None else single_rank()
    return engine_of(model, ParallelismSection(**split), encoder, ranks, policy)


def policy(
    vision: Mode = "full",
    projector: Mode = "full",
    language: Mode = "full",
    *,
    seed: int = 0,
    **lora: Any,
) -> TrainingPolicy:
    """A policy with one learning rate; adapters of rank 4 unless `lora` says otherwise."""
    trainable = TrainableSection(
        vision=vision,
        projector=projector,
        language=language,
        lora=LoraSection(**{"rank": 4, "alpha": 8.0, **lora}),
    )
    return TrainingPolicy(trainable=trainable, optim=ADAMW, seed=seed)


def make_stepper(
    engine: Any,
    *,
    objective: Objective = SFT,
    max_grad_norm: float | None = 1.0,
    check: bool = False,
) -> Stepper:
    """A constant learning rate; with `check` the first step is looked at, as in a run.

    AdamW's first steps are nearly the sign of the gradient: an element whose gradient is nothing
    but rounding moves by the learning rate, one way or the other. The rate is small so that what
    this does to later steps stays below the bound of 1e-5 that is about the gradients themselves.
    """
    schedule = Schedule(ADAMW, total_steps=100)
    return Stepper(
        engine=engine,
        objective=objective,
        schedule=schedule,
        max_grad_norm=max_grad_norm,
        ranks=engine.ranks,
        check=TrainabilityCheck(engine, engine.ranks) if check else None,
    )


def take_step(
    engine: Any, objective: Objective, batches: Sequence[Batch]
) -> tuple[float, dict[str, Tensor], Mapping[str, float]]:
    """(loss, gradients, totals) of one step, whose weights stay. A validation has the same loss."""
    stepper = make_stepper(engine, objective=objective, max_grad_norm=None)
    stepper.schedule = lambda step: 0.0
    sums, _ = stepper.train(0, batches, num_skipped=0, stop=False)
    found = {name: parameter.grad.clone() for name, parameter in engine.parameters()}
    engine.zero_gradients()
    evaluated = stepper.evaluate(batches).loss
    assert sums.loss is not None and evaluated is not None
    assert math.isclose(evaluated, sums.loss, rel_tol=1e-13)
    return sums.loss, found, sums.totals


def worst(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest relative L2 distance of a parameter's gradient from the wanted one."""
    assert found.keys() == wanted.keys()
    return max(relative_l2(found[name], wanted[name]) for name in wanted)
