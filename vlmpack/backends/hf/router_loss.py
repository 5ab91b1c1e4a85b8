"""Mixtures of experts: their load-balancing loss, and which form computes their experts.

The loss is over the real tokens of each micro-batch:

    router logits of each layer (T, E) -> how often each expert was chosen, and its mean probability
    -> E / K * sum of their products (2101.03961, equation 4) -> its gradient, beside the losses'

The loss is weighted by the micro-batch's real tokens, as the losses of label tokens are summed. The
mcore engine adds the same number. It is not part of any sample's loss, and is reported separately.
Nothing is read on the host. Ranks that share a row add up what each counts of it.

Experts are computed by one of transformers' forms, chosen once and reported:

    grouped_mm  tokens sorted by expert, one grouped matmul for all experts: exact and the fastest
    eager       a loop over the experts that are asked, whose backward fills all weights for each

The other forms are left out. batched_mm copies an expert's weights for every token that chose it.
It is slower than the loop and runs out of memory at real sizes. deepgemm and sonicmoe fetch kernels
from the Hub, which is code, and nothing has compared them with the loop yet.

Shapes: T slots, E experts, K experts of a token, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.engine import RouterSum
from vlmpack.backends.hf.adapted_experts import expert_modules
from vlmpack.errors import CapabilityError
from vlmpack.packing import Batch, PaddedBatch, padded_as_row, padding_mask

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Keys of configs that count a layer's experts."""


@dataclass(frozen=True, slots=True)
class RouterLoss:
    """The load-balancing loss, added to the gradients of a model with experts."""

    coefficient: float
    top_k: int
    sum: RouterSum = field(default_factory=RouterSum, compare=False)

    def attach(self, hidden: Tensor, logits: Sequence[Tensor], batch: Batch) -> Tensor:
        """The same hidden states. Their backward pass adds the loss's gradient.

        Args:
            hidden: (T, D), on the way to the losses.
            logits: (T, E) of each layer with experts; of this rank's slots where ranks share a row.
        """
        row = padded_as_row(batch) if isinstance(batch, PaddedBatch) else batch
        real = ~padding_mask(row).flatten().to(hidden.device, non_blocking=True)
        part = batch.context
        own = real if part is None else real.index_select(0, part.row_index)
        sums = torch.stack([routed(layer, own, self.top_k) for layer in logits])
        if part is not None:  # ranks that share the row: all have its sums
            assert part.all_sum is not None
            sums = part.all_sum(sums)
        losses = torch.stack([balance_loss(layer, self.top_k) for layer in sums])
        self.sum.add(batch.num_tokens / (1 if part is None else part.size) * losses.mean())
        loss = self.coefficient * batch.num_tokens * losses.sum()
        output: Tensor = _WithLoss.apply(hidden, loss)  # type: ignore[no-untyped-call]
        return output


def routed(logits: Tensor, real: Tensor, top_k: int) -> Tensor:
    """(2, E): how often a layer chose each expert, and the sum of its probabilities over tokens.

    Args:
        logits: (T, E) of the router.
        real: (T,) bool, whether a slot holds a token.
    """
    probabilities = torch.softmax(logits.float(), dim=-1)
    chosen = probabilities.detach().topk(top_k, dim=-1).indices
    weights = real.float()
    counts = weights.new_zeros(logits.shape[-1]).index_add_(
        0, chosen.flatten(), weights.repeat_interleave(top_k, output_size=chosen.numel())
    )
    return torch.stack([counts, (probabilities * weights[:, None]).sum(dim=0)])


def balance_loss(sums: Tensor, top_k: int) -> Tensor:
    """The load-balancing loss of one layer, 0-d; 1 where all experts are chosen alike.

    Args:
        sums: (2, E), see `routed`.
    """
    counts, probabilities = sums
    tokens = (counts.sum() / top_k).clamp(min=1)
    loss: Tensor = sums.shape[1] * (counts / (tokens * top_k) * (probabilities / tokens)).sum()
    return loss


def router_loss(language: Any, coefficient: float) -> RouterLoss | None:
    """The router loss of a decoder; None for a coefficient of 0.

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
    """Say which kind of decoder has no such loss."""
    named = next((key for key in EXPERTS if config.get(key)), None)
    if named is None:
        return "it is dense"
    return (
        f"it has experts ({named}: {config[named]}), but its config knows no router_aux_loss_coef "
        f"and the class computes none"
    )


def describe_router_loss(language: Any, coefficient: float) -> dict[str, str]:
    """The choice, for the log and the report. Empty if nobody asks for the loss."""
    if coefficient:
        return {"router loss": f"{coefficient:g} x load balancing, over each row's real tokens"}
    if getattr(language.config, "output_router_logits", False):
        return {
            "router loss": "none: model.router_aux_loss_coef asks for it here, "
            "not output_router_logits in config.json"
        }
    return {}


class _WithLoss(torch.autograd.Function):
    """The identity, whose backward pass gives an additional loss a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


_OURS = "vlmpack_grouped_mm"
"""What our form of grouped_mm is called among transformers' own."""


class InComputeDtype:
    """A module of experts as autocast would run it, although autocast knows no grouped matmul.

    Its weights have the compute dtype; everything else is the module's own.
    """

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, nn.Parameter) else value


def set_experts(language: Any) -> dict[str, str]:
    """Choose how a decoder's experts are computed, and make it compute them so.

    Returns:
        What was chosen, for the log and the report; empty where there was nothing to choose.
    """
    if next(expert_modules(language), None) is None:
        return {}
    try:
        language.get_correct_experts_implementation("grouped_mm")
    except (ValueError, ImportError) as error:
        language.set_experts_implementation("eager")
        return {"experts": f"eager (grouped_mm cannot run: {error})"}
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_OURS, grouped_experts)
    language.set_experts_implementation(_OURS)
    return {"experts": "grouped_mm (first choice)"}


def grouped_experts(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' grouped_mm, under autocast in the dtype that its loop computes in.

    Args:
        hidden_states: (T, D).
        top_k_index: (T, K) int64, the experts of each token.
        top_k_weights: (T, K), what their outputs are weighed with.

    Returns:
        (T, D).
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    device = hidden_states.device.type
    if torch.is_autocast_enabled(device):
        experts = InComputeDtype(experts, torch.get_autocast_dtype(device))
    output: Tensor = grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    return output
