"""What `model.dtype` and `model.attention` come to on the device at hand: no engine sees `auto`."""

from __future__ import annotations

import torch

from vlmpack.attention import AttentionChoice, choose_attention, segment_attention
from vlmpack.backends.engine import Compute
from vlmpack.capabilities.served import SERVED
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.recipe.schema import ModelSection, ParallelismSection


def settled_model(model: ModelSection, device: torch.device) -> ModelSection:
    """With its dtype: auto is bfloat16 on CUDA and float32 elsewhere."""
    return model.settled("bfloat16" if device.type == "cuda" else "float32")


def compute_dtype(model: ModelSection, device: torch.device) -> torch.dtype:
    """What a model computes in there."""
    return torch.bfloat16 if settled_model(model, device).dtype == "bfloat16" else torch.float32


def settled_compute(
    model: ModelSection,
    split: ParallelismSection,
    encoder: Encoder,
    device: torch.device,
    *,
    captures: bool = False,
) -> Compute:
    """What an engine computes with on `device`.

    Args:
        captures: whether the decoder is recorded (`training.cuda_graphs`).

    Raises:
        CapabilityError: that attention cannot run here, or knows no context parallelism.
    """
    dtype, family = compute_dtype(model, device), encoder.family
    if model.attention == "transformer_engine":
        from vlmpack.backends.mcore.te_versions import require_transformer_engine

        require_transformer_engine(device)
        return Compute(dtype, None)
    stateful = any(SERVED[name].layers for name in family.model_types if name in SERVED)
    if model.backend == "mcore" and model.attention == "auto" and not (captures or stateful):
        from vlmpack.backends.mcore.te_versions import passed_transformer_engine

        version = passed_transformer_engine(device, dtype)
        if version is not None:
            return Compute(dtype, None, f"tests/gpu has passed with {version}")
    if split.context > 1 and model.attention == "auto" and not captures:
        why = "with context parallelism; or transformer_engine"
        return Compute(dtype, AttentionChoice("segments", segment_attention, why))
    choice = choose_attention(
        model.attention,
        device=device,
        dtype=dtype,
        image_blocks=family.modules.image_blocks,
        largest_head=family.largest_head,
        fixed_shape=captures,
    )
    if split.context > 1 and choice.name != "segments" and not captures:
        raise CapabilityError(
            f"model.attention: {choice.name} knows no context parallelism (parallelism.context is "
            f"{split.context}); use segments or transformer_engine"
        )
    return Compute(dtype, choice, captures=captures)
