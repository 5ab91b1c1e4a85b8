"""The load-balancing loss of a mixture of experts, over the real tokens of each micro-batch.

    router logits of each layer (T, E) -> how often each expert was chosen, and its mean probability
    -> E / K * sum of their products (2101.03961, equation 4) -> its gradient, beside the losses'

It is weighed by the micro-batch's real tokens, as the losses of label tokens are summed: the same
number that the mcore engine adds. No loss of a sample holds it; it is reported by itself, and
nothing reads the host.

Shapes: T slots, E experts, K experts of a token, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vlmpack.backends.router_sum import RouterSum
from vlmpack.errors import CapabilityError
from vlmpack.packing import Batch, PaddedBatch, padded_as_row, padding_mask

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Keys of configs that count a layer's experts."""


@dataclass(frozen=True, slots=True)
class RouterLoss:
    """What is added to the gradients of a model with experts.

    Args:
        coefficient: `model.router_aux_loss_coef` of a recipe.
        top_k: K, experts of a token.
        sum: where the loss is added up for the report.
    """

    coefficient: float
    top_k: int
    sum: RouterSum = field(default_factory=RouterSum, compare=False)

    def beside(self, hidden: Tensor, logits: Sequence[Tensor], batch: Batch) -> Tensor:
        """The same hidden states, whose backward pass brings the loss's gradient along.

        Args:
            hidden: (T, D), on the way to the losses.
            logits: (T, E) of each layer with experts.
            batch: that they are of.
        """
        row = padded_as_row(batch) if isinstance(batch, PaddedBatch) else batch
        real = ~padding_mask(row).flatten().to(hidden.device, non_blocking=True)
        losses = torch.stack([layer_loss(layer, real, self.top_k) for layer in logits])
        self.sum.add(batch.num_tokens * losses.mean())
        loss = self.coefficient * batch.num_tokens * losses.sum()
        output: Tensor = _Beside.apply(hidden, loss)  # type: ignore[no-untyped-call]
        return output


def layer_loss(logits: Tensor, real: Tensor, top_k: int) -> Tensor:
    """The load-balancing loss of one layer, 0-d; 1 where all experts are chosen alike.

    Args:
        logits: (T, E) of the router.
        real: (T,) bool, whether a slot holds a token.
        top_k: experts of a token.
    """
    experts = logits.shape[-1]
    probabilities = torch.softmax(logits.float(), dim=-1)
    chosen = probabilities.detach().topk(top_k, dim=-1).indices
    weights = real.float()
    tokens = weights.sum().clamp(min=1)
    counts = weights.new_zeros(experts).index_add_(
        0, chosen.flatten(), weights.repeat_interleave(top_k, output_size=chosen.numel())
    )
    mean = (probabilities * weights[:, None]).sum(dim=0) / tokens
    return experts * (counts / (tokens * top_k) * mean).sum()


def router_loss(language: Any, coefficient: float) -> RouterLoss | None:
    """What a decoder is to be trained with beside the losses; None for a coefficient of 0.

    Args:
        language: transformers' decoder.
        coefficient: `model.router_aux_loss_coef` of a recipe.

    Raises:
        CapabilityError: the decoder has no such loss in transformers.
    """
    if not coefficient:
        return None
    config: dict[str, Any] = language.config.to_dict()
    if "router_aux_loss_coef" not in config or "num_experts_per_tok" not in config:
        raise CapabilityError(
            f"model.router_aux_loss_coef: {coefficient}, but {type(language).__name__} has no "
            f"load-balancing loss in transformers: {_why_none(config)}; leave it out"
        )
    return RouterLoss(coefficient, int(config["num_experts_per_tok"]))


def _why_none(config: Mapping[str, Any]) -> str:
    """What a decoder without the loss is.

    Args:
        config: of transformers' decoder.
    """
    named = next((key for key in EXPERTS if config.get(key)), None)
    if named is None:
        return "it is dense"
    return (
        f"it has experts ({named}: {config[named]}), but its config knows no router_aux_loss_coef "
        f"and the class computes none"
    )


def describe_router_loss(language: Any, coefficient: float) -> dict[str, str]:
    """What was chosen, for the log and the report; empty where nobody asks for it."""
    if coefficient:
        return {"router loss": f"{coefficient:g} x load balancing, over each row's real tokens"}
    if getattr(language.config, "output_router_logits", False):
        return {
            "router loss": "none: model.router_aux_loss_coef asks for it here, "
            "not output_router_logits in config.json"
        }
    return {}


class _Beside(torch.autograd.Function):
    """The identity, whose backward pass gives the loss beside it a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)
