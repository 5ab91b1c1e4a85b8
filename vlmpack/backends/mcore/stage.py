"""Beside Megatron's layers of a stage: the vision tower, and its copies' gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from vlmpack.backends.mcore.delta_net import SUMMED_OVER_TP
from vlmpack.backends.mcore.model import MegatronVLM, VisionTower
from vlmpack.backends.recompute import draws_random_numbers, recompute_layers
from vlmpack.encode import Encoder
from vlmpack.model_folder.load import build_part
from vlmpack.recipe.recompute import Recomputed


def vision_tower(
    config: TransformerConfig, skeleton: nn.Module, encoder: Encoder, recomputed: Recomputed
) -> VisionTower | None:
    """The vision tower with its projector, weights still to be read; None where the model has none,
    and on all stages but the first.

    Args:
        config: Megatron's configuration.
        skeleton: the transformers model without weights.
        encoder: the model folder's processor.
        recomputed: what is computed again in the backward pass.
    """
    path = encoder.family.modules.vision
    if path is None or not parallel_state.is_pipeline_first_stage():
        return None
    tower: Any = build_part(skeleton.get_submodule(path))
    for parameter in tower.parameters():  # buffers stay float32: rotary frequencies
        parameter.data = parameter.data.to(config.params_dtype)
    draws = draws_random_numbers(tower, adapter_dropout=0.0)
    recompute_layers(tower, recomputed, draws=draws)
    family, blank = encoder.family, encoder.image_rule.smallest()
    rule = family.tower_rule(tower.config.to_dict())
    if rule is not None:
        blank = replace(blank, tower=rule(blank.grid_thw))
    return VisionTower(tower, blank, family.tower_features, rule)


def replicated(model: MegatronVLM, *, distributed: bool) -> DistributedDataParallel:
    """The stage with its gradient buckets, known to the schedule.

    Args:
        model: the stage; which of its parameters are trained is settled.
        distributed: shard the optimizer over the replicas.
    """
    config, groups = model.config, model.groups
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=distributed,
            average_in_collective=False,
        ),
        model,
        pg_collection=groups,
    )
    config.no_sync_func = ddp.no_sync
    config.finalize_model_grads_func = partial(_finalize, tp=groups.tp)
    return ddp


def _finalize(
    model: list[nn.Module], num_tokens: Tensor | None, *, tp: dist.ProcessGroup, **arguments: Any
) -> None:
    """Reduce gradients over replicas and stages; over the TP ranks those of the tower, which they
    shared out, and of copies that each used for its own heads.

    `num_tokens` is left out: the trainer divides once, by a count it never reads on the host.
    """
    finalize_model_grads(model, None, **arguments)
    if tp.size() == 1:
        return
    gradients: list[Any] = [
        getattr(parameter, "main_grad")  # noqa: B009 (Megatron's DDP adds it)
        for chunk in model
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
        and (".vision." in f".{name}" or getattr(parameter, SUMMED_OVER_TP, False))
    ]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=tp)
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))
