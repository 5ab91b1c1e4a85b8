"""Megatron's optimizer, driven without a read from the device.

Megatron's own `step()` reads the gradient norm on the host. Here its parts are called one by one
and the norm stays a tensor, so that the trainer reads everything about a step at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor, nn

from vlmpack.backends.engine import clip_factor, multiply_all
from vlmpack.backends.mcore.versions import gradients_for_norm
from vlmpack.recipe.trainable import OptimSection

LR_SCALE = "lr_scale"
"""Attribute of a parameter and key of a group: its learning rate over that of the schedule."""


class MainParameter(NamedTuple):
    """The float32 weight that AdamW updates, and which part of a model parameter it is."""

    optimizer: Any
    """torch's optimizer, which holds the moments."""

    weight: Tensor
    """The main weight, flat where it is sharded."""

    start: int
    """Index of its first element in the flattened model parameter."""


def _learning_rates(ddp: nn.Module) -> dict[ParamKey, Any]:
    """A parameter group for each factor other than 1 that `mark_trained` has set."""

    def has(scale: float) -> ParamPredicate:
        return ParamPredicate(
            name=f"{LR_SCALE}_{scale!r}", fn=lambda p: getattr(p, LR_SCALE, 1.0) == scale
        )

    scales = {getattr(parameter, LR_SCALE, 1.0) for parameter in ddp.parameters()}
    return {ParamKey(predicate=has(scale)): {LR_SCALE: scale} for scale in sorted(scales - {1.0})}


class MegatronAdamW:
    """AdamW over the parameters of one pipeline stage.

    Args:
        distributed: shard main weights and moments over the data- and context-parallel ranks.
        bf16: whether the weights are bfloat16 (main weights are float32 in any case).
    """

    def __init__(
        self, ddp: DistributedDataParallel, optim: OptimSection, *, distributed: bool, bf16: bool
    ) -> None:
        megatron_config = OptimizerConfig(
            optimizer="adam",
            lr=0.0,
            min_lr=0.0,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            clip_grad=0.0,  # clipped here
            bf16=bf16,
            use_distributed_optimizer=distributed,
        )
        self.chained = get_megatron_optimizer(
            megatron_config,
            [ddp],
            # Vectors do not decay.
            get_standard_config_overrides(megatron_config) | _learning_rates(ddp),
            use_gloo_process_groups=False,
        )
        # Of one kind of parameter each; dense ones alone, without experts.
        self.parts: list[Any] = list(self.chained.chained_optimizers)
        self.distributed = distributed
        for group in self.chained.param_groups:
            group["weight_decay"] = optim.weight_decay * group["wd_mult"]

    def zero_grad(self) -> None:
        """Drop the gradients of main weights; DDP's buffers are the engine's."""
        self.chained.zero_grad()

    @torch.no_grad()
    def prepare(self, max_norm: float | None) -> Tensor:
        """Give reduced gradients to the main weights and clip them.

        Returns:
            0-d global L2 norm before clipping, each parameter counted once.
        """
        squares: list[Tensor] = []
        for part in self.parts:
            part.prepare_grads()
            gradients = gradients_for_norm(part) if part.param_groups else []
            total = torch.zeros((), dtype=torch.float32, device=torch.cuda.current_device())
            if gradients:
                total = torch.stack(torch._foreach_norm(gradients)).square().sum()
            dist.all_reduce(total, group=part.get_grad_stats_parallel_group())
            squares.append(total)
        norm = torch.stack(squares).sum().sqrt()
        if max_norm is not None:
            held = (parameter.grad for part in self.parts for parameter in part.get_parameters())
            multiply_all([grad for grad in held if grad is not None], clip_factor(norm, max_norm))
        return norm

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update main weights, then the model's, gathered over the ranks that share them."""
        for group in self.chained.param_groups:
            group["lr"] = lr * group.get(LR_SCALE, 1.0)
        for part in self.parts:
            part.step_with_ready_grads()

    def main_parameter(self, parameter: nn.Parameter) -> MainParameter | None:
        """The main weight behind a model parameter. None if other ranks hold all of it, or it is
        frozen."""
        if not parameter.requires_grad:
            return None
        for part in self.parts:
            if self.distributed:
                if parameter not in part.model_param_group_index_map:
                    continue
                group, order = part.model_param_group_index_map[parameter]
                main = part.optimizer.param_groups[group]["params"][order]
                start = part._get_model_param_range_map(parameter)["param"].start
                return MainParameter(part.optimizer, main, start)
            main = getattr(parameter, "main_param", parameter)
            if any(main is candidate for candidate in part.get_parameters()):
                return MainParameter(part.optimizer, main, 0)
        if not self.distributed:
            raise AssertionError("a parameter that no optimizer has")
        return None
