"""The language-model head and the cross entropy, on label tokens only and in chunks.

A full (T, vocabulary) float32 tensor never exists. The logits of one chunk are computed, reduced to
a loss and dropped, and the backward pass computes them again. This costs one more head matmul than
keeping them. On CUDA a kernel reads them as the product made them, and a frozen head's gradient is
made in the forward pass, without another product.

A cap c bends logits z to c tanh(z / c) (Gemma 2, 2408.00118, 2); their slope is 1 - tanh(z / c)^2.
A temperature divides a row of logits after that, as samplers do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vlmpack.backends import fused
from vlmpack.backends.even_width import evened, is_uneven
from vlmpack.backends.label_operators import OPERATORS
from vlmpack.kernel_operators import is_plain

CHUNK_BYTES = 128 << 20
"""Largest size of the float32 logits held at once: what fits caches of a CPU's memory system."""

CUDA_CHUNK_BYTES = 1 << 30
"""The same on CUDA, where products of 220 rows (V = 152k) are too thin to fill a GPU."""

KERNEL_CHUNK_BYTES = 1 << 31
"""The same where a kernel reads logits of 2 bytes. Its 7,000 rows (V = 152k) are as a rule those
of a whole micro-batch, whose gradient of the head is then one product."""


def chunk_rows(vocabulary: int, *, cuda: bool, kernels: bool = False) -> int:
    """Label tokens per chunk: as many as the bytes allow, at least 1.

    Args:
        kernels: whether kernels read the logits, on CUDA.
    """
    if kernels:
        return max(1, KERNEL_CHUNK_BYTES // (2 * vocabulary))
    return max(1, (CUDA_CHUNK_BYTES if cuda else CHUNK_BYTES) // (4 * vocabulary))


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """One rank's rows of a head that is split over a tensor-parallel group.

    Args:
        all_max: element-wise maximum over the group, in place.
        all_sum: element-wise sum over the group, in place.
    """

    start: int
    all_max: Callable[[Tensor], Tensor]
    all_sum: Callable[[Tensor], Tensor]


def _local_targets(
    targets: Tensor, rows: int, shard: VocabularyShard | None
) -> tuple[Tensor, Tensor | None]:
    """Targets as rows of the local head, and which of them it holds (None for all)."""
    if shard is None:
        return targets, None
    local = targets - shard.start
    inside = (local >= 0) & (local < rows)
    return local.clamp(0, rows - 1), inside


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Logits within (-cap, cap), of any shape; as they are without a cap."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums and losses are: float32, or float64 where the model is."""
    return torch.promote_types(dtype, torch.float32)


def _chunk_logits(hidden: Tensor, weight: Tensor, cap: float | None) -> Tensor:
    """(l, V) logits of some rows in float32 or wider, in one buffer."""
    logits: Tensor = hidden @ weight.T
    logits = logits.to(_wide(logits.dtype))
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _divided(logits: Tensor, temperatures: Tensor | None, chunk: slice) -> Tensor:
    """The logits of a chunk of rows, in place, by the rows' temperatures."""
    return logits if temperatures is None else logits.div_(temperatures[chunk, None])


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: int,
        shard: VocabularyShard | None,
        cap: float | None,
        temperatures: Tensor | None,
    ) -> Tensor:
        losses = hidden.new_empty(hidden.shape[0], dtype=_wide(hidden.dtype))
        # Kept apart: added up, the logits' magnitude would round the small differences away.
        peaks, log_sums = torch.empty_like(losses), torch.empty_like(losses)
        local, inside = _local_targets(targets, weight.shape[0], shard)
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            logits = _divided(_chunk_logits(hidden[chunk], weight, cap), temperatures, chunk)
            peak = logits.amax(dim=-1)
            if shard is not None:
                peak = shard.all_max(peak)
            shifted = logits.sub_(peak[:, None])
            picked = shifted.gather(1, local[chunk, None]).squeeze(1)
            total = shifted.exp_().sum(dim=-1)
            if shard is not None and inside is not None:
                both = shard.all_sum(torch.stack((total, picked * inside[chunk])))
                total, picked = both[0], both[1]
            peaks[chunk], log_sums[chunk] = peak, total.log()
            losses[chunk] = log_sums[chunk] - picked
        ctx.save_for_backward(hidden, weight, local, inside, peaks, log_sums, temperatures)
        ctx.rows, ctx.cap = rows, cap
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, local, inside, peaks, log_sums, temperatures = ctx.saved_tensors
        grad_losses: Tensor = grads[0] if temperatures is None else grads[0] / temperatures
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None  # a frozen head needs no third product, nor (V, D) numbers for it
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=_wide(weight.dtype))
        for start in range(0, hidden.shape[0], ctx.rows):
            chunk = slice(start, start + ctx.rows)
            logits = _chunk_logits(hidden[chunk], weight, ctx.cap)
            slope = None if ctx.cap is None else (logits / ctx.cap).square_().neg_().add_(1)
            logits = _divided(logits, temperatures, chunk)
            probabilities = logits.sub_(peaks[chunk, None]).sub_(log_sums[chunk, None]).exp_()
            hit = probabilities.new_ones(probabilities.shape[0])
            if inside is not None:
                hit = hit * inside[chunk]
            probabilities.scatter_add_(1, local[chunk, None], -hit[:, None])
            grad_logits = probabilities.mul_(grad_losses[chunk, None])
            if slope is not None:
                grad_logits = grad_logits.mul_(slope)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[chunk] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[chunk]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *(None,) * 5


class _FusedCrossEntropy(torch.autograd.Function):
    """The same by `label_operators`, whose kernels read logits as the product made them.

    The gradient of a row of hidden states is the row's own factor times a row that does not depend
    on it. So where the head is frozen, the forward pass makes it from the logits at hand, and the
    backward pass multiplies it.

    Rows of the head behind the vocabulary are zeros (`even_width.py`). Their logits are zeros too,
    which no loss reads and no gradient changes, so the products behind take them as they are.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: int,
        cap: float,
        vocabulary: int,
        temperatures: Tensor | None,
    ) -> Tensor:
        found = [hidden.new_empty(hidden.shape[0], dtype=_wide(hidden.dtype)) for _ in range(3)]
        at_once = ctx.needs_input_grad[0] and not ctx.needs_input_grad[1]
        slopes = torch.empty_like(hidden) if at_once else None
        ones = found[0].new_ones(1).expand(hidden.shape[0])
        divided = ones if temperatures is None else 1 / temperatures
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            logits = hidden[chunk] @ weight.T
            own = logits[:, :vocabulary]
            by = None if temperatures is None else temperatures[chunk]
            made = OPERATORS.label_losses(own, targets[chunk], cap, by)
            for whole, part in zip(found, made, strict=True):
                whole[chunk] = part
            if slopes is not None:
                OPERATORS.label_gradients(own, targets[chunk], *made[1:], divided[chunk], cap, by)
                torch.mm(logits, weight, out=slopes[chunk])
        ctx.rows, ctx.cap, ctx.vocabulary = rows, cap, vocabulary
        kept = (slopes,) if at_once else (hidden, weight, targets, *found[1:], temperatures)
        ctx.save_for_backward(*kept)
        return found[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if len(ctx.saved_tensors) == 1:
            (slopes,) = ctx.saved_tensors
            return (slopes * grads[0][:, None]).to(slopes.dtype), *(None,) * 6
        hidden, weight, targets, peaks, log_sums, temperatures = ctx.saved_tensors
        grad_losses = grads[0] if temperatures is None else grads[0] / temperatures
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        for start in range(0, hidden.shape[0], ctx.rows):
            chunk = slice(start, start + ctx.rows)
            logits = hidden[chunk] @ weight.T
            given = (targets[chunk], peaks[chunk], log_sums[chunk], grad_losses[chunk])
            by = None if temperatures is None else temperatures[chunk]
            OPERATORS.label_gradients(logits[:, : ctx.vocabulary], *given, ctx.cap, by)
            torch.mm(logits, weight, out=grad_hidden[chunk])
            part = logits.T @ hidden[chunk]
            if grad_weight is None:  # the only one as a rule, which is then rounded once
                grad_weight = part if hidden.shape[0] <= ctx.rows else part.to(_wide(part.dtype))
            else:
                grad_weight += part
        if grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return grad_hidden, grad_weight.to(weight.dtype), *(None,) * 5


def has_kernels(hidden: Tensor) -> bool:
    """Whether Triton's kernels can read the logits of these hidden states. They compute in
    float32, so float64 is left to torch."""
    is_wide = hidden.dtype is torch.float64
    return hidden.is_cuda and not is_wide and fused.why_no_kernels(hidden.device) is None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    rows_per_chunk: int | None = None,
    shard: VocabularyShard | None = None,
    cap: float | None = None,
    temperatures: Tensor | None = None,
) -> Tensor:
    """Cross entropy of a bias-free linear head, one loss a label token.

    Args:
        hidden: (L, D) final hidden states of the label tokens; cast to autocast's dtype inside it.
        weight: (V, D) the head, or this rank's rows of it.
        targets: (L,) int64, each in [0, V of the whole head); L may be 0.
        rows_per_chunk: label tokens per chunk; None for `chunk_rows` of V.
        shard: None where the head is whole. Each tensor-parallel rank calls with the same hidden
            states and gets the same losses. The gradient of `hidden` is then this rank's part of a
            sum over the group, as in Megatron's column-parallel layers.
        cap: bound of the logits, above 0; None where the model has none.
        temperatures: (L,) above 0, what each row of logits is divided by; None for 1.

    Returns:
        (L,) float32 losses: -log softmax(capped(hidden @ weight.T) / temperature)[target].
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):  # cast here: backward runs outside autocast
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    kernels = shard is None and has_kernels(hidden) and not is_plain()
    vocabulary = weight.shape[0]
    is_padded = kernels and is_uneven(vocabulary, hidden.dtype)
    weight = evened(weight, 0, hidden.dtype) if is_padded else weight.to(hidden.dtype)
    rows = rows_per_chunk or chunk_rows(vocabulary, cuda=hidden.is_cuda, kernels=kernels)
    if temperatures is not None:
        temperatures = temperatures.to(_wide(hidden.dtype))
    losses: Tensor
    if kernels:
        given = (hidden, weight, targets, rows, cap or 0.0, vocabulary, temperatures)
        losses = _FusedCrossEntropy.apply(*given)  # type: ignore[no-untyped-call]
    else:
        whole = (hidden, weight, targets, rows, shard, cap, temperatures)
        losses = _LinearCrossEntropy.apply(*whole)  # type: ignore[no-untyped-call]
    return losses
