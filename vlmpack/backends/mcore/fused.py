"""Which of a Megatron layer's parts run as one kernel each.

Norms and rotations are ours, by what `model.fused_layers` comes to; with Transformer Engine norms
are its own. SwiGLU is Megatron's flag `bias_activation_fusion`, which has torch compile it.
Megatron's `apply_rope_fusion` stays off: for packed rows it is Transformer Engine's kernel for THD,
which counts from 0 in every segment, and positions of an image are no count. The residual sum
without dropout is one kernel, so `bias_dropout_fusion` has nothing to fuse; `persist_layer_norm`
and `masked_softmax_fusion` are about layer norms and scores that no model here has.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from vlmpack.backends.fused import FusedOps, choose_fused
from vlmpack.distributed.launch_order import VARIABLE
from vlmpack.recipe.schema import ModelSection, ParallelismSection


@dataclass(frozen=True, slots=True)
class FusedParts:
    """What is fused.

    Args:
        ops: what runs norms and rotations; None for torch's operators one by one.
        activation: whether SwiGLU is one kernel.
        described: one line for the log.
    """

    ops: FusedOps | None
    activation: bool
    described: str

    @classmethod
    def of(
        cls, model: ModelSection, device: torch.device, *, transformer_engine: bool
    ) -> FusedParts:
        """Those of a recipe on a device.

        Raises:
            CapabilityError: what is asked for by name cannot run here.
        """
        ops, why = choose_fused(model.fused_layers, device)
        activation = model.fused_layers != "none" and (ops is not None or device.type == "cuda")
        own = f"none ({why})" if ops is None else f"{ops.name} ({ops.reason})"
        rotates = ops is not None and ops.rotate is not None
        said = {"norms and rotations": own} if rotates or ops is None else {"norms": own}
        if transformer_engine:
            said = {"norms": "Transformer Engine's", "rotations": own if rotates else "none"}
        said["SwiGLU"] = "Megatron's" if activation else "none"
        return cls(ops, activation, "; ".join(f"{part}: {runs}" for part, runs in said.items()))


def launch_queues(split: ParallelismSection, device: torch.device) -> dict[str, str]:
    """For the log: what CUDA_DEVICE_MAX_CONNECTIONS is where it matters, under tensor and context
    parallelism. `vlmpack.distributed.launch_order` says why, and sets it."""
    found = os.environ.get(VARIABLE)
    if device.type != "cuda" or max(split.tensor, split.context) == 1:
        return {}
    said = "1" if found == "1" else f"{found or 'not set'}; up to Hopper GPUs set it to 1"
    return {VARIABLE: said}
