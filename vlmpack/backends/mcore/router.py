"""Megatron's router with an auxiliary loss for packed rows.

Megatron 0.16.1 divides by the row's real tokens, so a row of padding alone has gradients of NaN.
Such a row comes from a bin whose samples all became holes. Megatron also weights each rank's part
by a count that its in-place all-reduce turns into the whole row's. Here the count is the whole
row's on purpose, so that the loss does not depend on how a row is spread over ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from vlmpack.backends.engine import RouterSum


class PackedRouter(TopKRouter):
    """Top-k router; the load-balancing loss (2101.03961, 2.2) of a row counts as many times as the
    row has real tokens, as the losses of its tokens are summed."""

    report: RouterSum | None = None
    """Where it is added up for the report."""

    num_routed: int = 1
    """Layers with experts, over all pipeline stages."""

    def _apply_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        weight = self.get_aux_loss_coeff("aux_loss")
        if weight == 0:
            return probs
        by_expert = routing_map.sum(dim=0)  # padding is masked out already
        dist.all_reduce(by_expert, group=self.tp_cp_group)
        tokens = (by_expert.sum() / self.topk).clamp(min=1)
        loss = switch_load_balancing_loss_func(
            probs=scores_for_aux_loss,
            tokens_per_expert=by_expert,
            total_num_tokens=tokens,
            topk=self.topk,
            num_experts=self.num_experts,
            moe_aux_loss_coeff=weight,
        )
        # For this rank's tokens; the ranks' parts add up to the row's. A layer that is recomputed
        # in a backward pass has been counted. Detached, or one pass would save a tensor more.
        if self.report is not None and not _in_backward():
            self.report.add(loss.detach() * tokens / (weight * self.num_routed))
        output: Tensor = MoEAuxLossAutoScaler.apply(probs, loss * tokens)
        return output


class BiasedRouter(PackedRouter):
    """DeepSeek-V3's router: it chooses experts by the sigmoid of their logits plus a bias, and
    weights them without it.

    The bias is no parameter. Megatron's own router moves it a little at each step, and sums what
    experts get over all ranks for that. Finetuning leaves the bias as published.
    """

    def __init__(self, config: Any, pg_collection: Any = None, **given: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **given)
        del self.expert_bias  # None, by the flag that would have it moved
        bias = torch.zeros(config.num_moe_experts, dtype=torch.float32)
        self.register_buffer("expert_bias", bias, persistent=False)


def biased_routers(layers: Iterable[Any]) -> Iterator[tuple[int, BiasedRouter]]:
    """Number, from 0, and router of a stage's layers that have one with a bias."""
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, BiasedRouter):
                yield layer.layer_number - 1, module


def _in_backward() -> bool:
    """Whether autograd calls; as torch's own checkpoint asks."""
    return bool(torch._C._current_graph_task_id() != -1)


def report_routers(model: nn.Module, num_routed: int) -> RouterSum:
    """Have the routers of this stage add their losses to a sum from now on."""
    report = RouterSum()
    for module in model.modules():
        if isinstance(module, PackedRouter):
            module.report, module.num_routed = report, num_routed
    return report
