"""Weights and moments between an engine and a checkpoint, under transformers' names."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmpack.errors import CheckpointError
from vlmpack.training.checkpoint import Checkpoint
from vlmpack.training.step import Stepper

MOMENTS = ("exp_avg", "exp_avg_sq")


def gather_weights(stepper: Stepper) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Whole parameters and moments on CPU, under transformers' names. Collective."""
    model: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    is_main = stepper.ranks.is_main
    for name, parameter in stepper.engine.parameters():
        whole = stepper.engine.full_tensor(parameter)
        moments = stepper.optimizer.state.get(parameter, {})
        gathered = {kind: stepper.engine.full_tensor(moments[kind]) for kind in MOMENTS if moments}
        if not is_main:
            continue  # took part in the collective; keeps nothing
        model[name] = whole
        optimizer.update({f"{kind}.{name}": value for kind, value in gathered.items()})
        if moments:
            optimizer[f"step.{name}"] = moments["step"].detach().cpu().clone()
    return model, optimizer


def load_weights(stepper: Stepper, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's parameters and moments into the model and its optimizer.

    Raises:
        CheckpointError: names or shapes differ.
    """
    expected = dict(stepper.engine.parameters())
    if set(expected) != set(checkpoint.model):
        odd = sorted(set(expected) ^ set(checkpoint.model))[:5]
        raise CheckpointError(f"the checkpoint has other parameters than the model: {odd} ...")
    with torch.no_grad():
        for name, parameter in expected.items():
            whole = checkpoint.model[name]
            if whole.shape != parameter.shape:
                raise CheckpointError(
                    f"{name}: shape {tuple(whole.shape)} in the checkpoint, "
                    f"{tuple(parameter.shape)} in the model"
                )
            parameter.copy_(stepper.engine.like_parameter(parameter, whole))
            if f"step.{name}" not in checkpoint.optimizer:
                continue
            state = stepper.optimizer.state[parameter]
            for kind in MOMENTS:
                moment = checkpoint.optimizer[f"{kind}.{name}"]
                state[kind] = stepper.engine.like_parameter(parameter, moment)
            # A fused AdamW keeps its step count beside the weights, the plain one on the CPU.
            home = parameter.device if stepper.optimizer.defaults.get("fused") else "cpu"
            state["step"] = checkpoint.optimizer[f"step.{name}"].to(home)
