"""The recipe's engine as it is verified: as the run builds it, less what is random or rounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from vlmpack.backends.engine import Engine
from vlmpack.build.engine import EngineSpec, build_engine
from vlmpack.proof.measure import full_float32
from vlmpack.training.checkpoint.random_states import random_state, restore_random_state

Dtype = Literal["float32", "recipe"]


def verified_spec(spec: EngineSpec, dtype: torch.dtype) -> EngineSpec:
    """The engine with what verifying needs otherwise.

    Kernels that know bfloat16 alone give way to the automatic choice in float32. What the stock
    model has not is left out: 4-bit weights, dropout, adapters that have learnt something. So is
    the experts' auxiliary loss, which is no part of a sample's loss. Gradients are read out of the
    moments of torch's own AdamW.
    """
    model, policy = spec.model, spec.policy
    exact = dtype is torch.float32
    needs_bfloat16 = model.attention not in ("auto", "segments")
    changed = model.model_copy(
        update={
            "path": str(spec.encoder.folder),
            "adapter": None,
            "dtype": "float32" if exact else "bfloat16",
            "attention": "auto" if exact and needs_bfloat16 else model.attention,
            "recurrence": "auto" if exact and model.recurrence == "kernels" else model.recurrence,
            "router_aux_loss_coef": 0.0,
        }
    )
    trainable = policy.trainable
    lora = trainable.lora.model_copy(update={"dropout": 0.0, "quantize": "none"})
    policy = replace(
        policy,
        trainable=trainable.model_copy(update={"lora": lora}),
        optim=policy.optim.model_copy(update={"name": "adamw"}),
    )
    return replace(spec, model=changed, policy=policy)


def build_verified_engine(spec: EngineSpec) -> Engine:
    """An engine of its own, to be thrown away; collective."""
    engine = build_engine(spec)
    for module in engine.module.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "drop_prob", None), float):  # of whole residual branches
            vars(module)["drop_prob"] = 0.0
    return engine


@contextmanager
def as_it_was() -> Iterator[None]:
    """Full float32 inside; random numbers go on afterwards as if nothing had been.

    Any more rounding would be the measure's own, not the packing's.
    """
    states = random_state()
    try:
        with full_float32():
            yield
    finally:
        restore_random_state(states)
