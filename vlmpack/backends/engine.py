"""What the trainer asks of an engine, in the shape of Megatron's schedules.

A forward step takes (data_iterator, model) and returns the model's output and a loss function. The
loss function maps the output to (loss sum, number of label tokens, sums to report by name). Only
Megatron uses the number, because the objective decides what divides. The engine runs the steps of
one optimizer step, accumulates gradients of the *sum*, and returns the sums. The optimizer is the
engine's own. Its state is read and written as boxes of whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vlmpack.attention import AttentionChoice
from vlmpack.backends.boxes import Kind, ReadSlice, TensorSlice
from vlmpack.backends.policy import ComponentCount, TrainingPolicy, component_of
from vlmpack.distributed import Ranks
from vlmpack.families.base import ModulePaths
from vlmpack.packing import Batch

ROUTER_SUM = "router_loss_sum"

ROUTER_REPORT: Mapping[str, tuple[str, str]] = {"router_loss": (ROUTER_SUM, "num_tokens")}
"""Column of metrics.jsonl -> (sum, the count that divides it)."""


@dataclass(slots=True)
class RouterSum:
    """The sum of router losses. An engine's routers add to it during training, and its stepper
    takes it.

        a micro-batch -> its loss, a mean over layers, times its real tokens -> added on the device
        sums of all ranks / real tokens of the step -> `router_loss` beside the loss

    So a row is weighted by its tokens, and the figure does not depend on the recipe's coefficient.
    It is 1 where all experts are chosen alike, and E / K where the same K of E experts get every
    token (2101.03961, equation 4).

    Args:
        total: what was added since the step began, 0-d float64; None for nothing.
    """

    total: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        """Add a loss.

        Args:
            loss: 0-d, times the real tokens of its micro-batch. One layer's loss is its part of the
                mean over layers, and a rank with part of a row adds that part.
        """
        loss = loss.detach().double()
        self.total = loss if self.total is None else self.total + loss

    def clear(self) -> None:
        """Begin a step."""
        self.total = None

    def take(self, device: torch.device) -> dict[str, Tensor]:
        """The step's sum by its name, 0-d float64 on the device, not read here; then zero."""
        total = self.total
        self.clear()
        if total is None:
            total = torch.zeros((), dtype=torch.float64, device=device)
        return {ROUTER_SUM: total}


LossFunction = Callable[[Tensor], tuple[Tensor, int, dict[str, Tensor]]]
"""Output -> (loss sum to differentiate, label tokens, detached sums to report)."""

ForwardStep = Callable[[Iterator[Batch], nn.Module], tuple[Tensor, LossFunction]]
"""Megatron's forward_step_func."""


@dataclass(frozen=True, slots=True)
class Compute:
    """The dtype and attention of a recipe's model on the device at hand.

    Args:
        attention: None for Transformer Engine's.
        why: the reason for Transformer Engine, where it is chosen.
        captures: whether the decoder of rows of one shape is recorded and replayed.
    """

    dtype: torch.dtype
    attention: AttentionChoice | None
    why: str = "as the recipe asks"
    captures: bool = False

    def described(self) -> dict[str, str]:
        """The choice, for the log and the report."""
        chosen = self.attention
        said = f"transformer_engine ({self.why})"
        if chosen is not None:
            said = f"{chosen.name} ({chosen.reason})"
        facts = {"compute dtype": str(self.dtype).removeprefix("torch."), "attention": said}
        return facts | ({"captured": "the decoder of planned rows"} if self.captures else {})


class Engine(Protocol):
    """A model that can be trained, with whatever parallelism the engine knows."""

    device: torch.device
    compute_dtype: torch.dtype
    ranks: Ranks
    module: nn.Module
    """What forward steps call with a batch."""

    description: dict[str, str]
    """What was chosen (engine, dtype, attention, sharding ...), for the log and the report."""

    optimizer_steps: int
    """Optimizer steps taken; AdamW's step count of every parameter."""

    policy: TrainingPolicy
    """What is trained."""

    paths: ModulePaths
    """Where the model's components live."""

    router_sum: RouterSum | None
    """Where the load-balancing loss of a mixture's experts is added up; None, on all ranks alike,
    where the recipe asks for none."""

    components: Sequence[ComponentCount]
    """What the policy comes to, for each component that the model has."""

    @property
    def draws(self) -> bool:
        """Whether its layers draw random numbers while they train."""

    @property
    def has_plain_path(self) -> bool:
        """Whether a forward pass can leave out fused parts (`kernel_operators.plain_path`)."""

    def forward_backward(
        self,
        forward_step: ForwardStep,
        data_iterator: Iterator[Batch],
        *,
        num_microbatches: int,
        forward_only: bool = False,
    ) -> list[dict[str, Tensor]]:
        """Run the micro-batches of one optimizer step and accumulate gradients of their loss sums.

        Returns:
            One report per micro-batch, on every rank. Summed over all ranks, the reports are
            the global sums, each counted once. So a rank reports nothing where it computes no
            loss, or the same as another rank.
        """

    def zero_gradients(self) -> None:
        """Drop the accumulated gradients, and what `router_sum` holds."""

    def finish_gradients(self, divisor: Tensor, max_norm: float | None) -> Tensor:
        """Turn accumulated gradients of loss sums into those of the mean loss, and clip them.

        Args:
            divisor: 0-d, on the device, never read on the host. It is the objective's, over the
                global batch; 0 counts as 1.
            max_norm: global L2 norm to clip to; None for no clipping.

        Returns:
            The global L2 norm before clipping, 0-d, on the device.
        """

    def step(self, lr: float) -> None:
        """One optimizer step with that learning rate."""

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of the trainable parameters under transformers' names, on any rank."""

    def owned_slices(self, *, moments: bool = True) -> Iterator[tuple[Kind, TensorSlice, Tensor]]:
        """The boxes that this rank writes, in a fixed order; views where possible. Not collective.

        Over all ranks each element of each parameter is written exactly once. The same holds for
        its moments once `optimizer_steps` > 0, unless `moments` is off.
        """

    def load_slices(self, read: ReadSlice, *, optimizer_steps: int) -> None:
        """Fill this rank's parameters and moments, one box at a time.

        Args:
            optimizer_steps: steps that the moments have seen; at 0 there are no moments.
        """

    def gradient_norms(self) -> Tensor:
        """(components,) float64 on the device: whether any trained element has a gradient.
        Collective.

        A value is zero only where every element is. Otherwise it is a norm in which an element
        counts once for each rank that holds it. Call it between `finish_gradients` and `step`.
        """

    def frozen_digests(self) -> tuple[list[str], Tensor]:
        """Names and (F,) int64 digests of what this rank holds of frozen parameters."""

    def held_parts(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank holds of weights, moments and buffers, by part. All ranks call it alike.

        A name says which elements its part has. Ranks that give the same name must hold the same
        bits.
        """

    def export(self, folder: Path, *, processor_from: Path, dtype: torch.dtype | None) -> None:
        """Write a folder that transformers' `from_pretrained` loads. Collective."""

    def export_adapter(self, folder: Path, *, base: str) -> None:
        """Write the adapters in peft's format. Collective.

        Args:
            base: the model folder, which the adapter's config names.

        Raises:
            CapabilityError: what was trained does not fit into that format.
        """

    def adapters_off(self) -> AbstractContextManager[None]:
        """A context in which forward passes leave adapters out. What is trained stays marked.

        Raises:
            CapabilityError: the model has none, or more than adapters is trained.
        """

    def generation(self) -> AbstractContextManager[Any]:
        """The bare transformers model, in eval mode and with stock attention, for generation."""


def or_one(divisor: Tensor) -> Tensor:
    """The divisor; 1 where it is 0, since the gradients of nothing are 0 already."""
    return divisor.where(divisor != 0, 1.0)


def multiply_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by one number that stays on its device."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for dtype, members in by_dtype.items():
        torch._foreach_mul_(members, factor.to(dtype))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor that clips gradients of a global norm, as in torch's `clip_grad_norm_`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def norms_by_component(engine: Engine, gradients: Iterable[tuple[str, Tensor]]) -> Tensor:
    """`Engine.gradient_norms`, from what this rank holds of them, by transformers' names."""
    zero = torch.zeros((), dtype=torch.float64, device=engine.device)
    squares = {count.component: zero for count in engine.components}
    for name, gradient in gradients:
        component = component_of(name, engine.paths)
        squares[component] = squares[component] + gradient.double().square().sum()
    return engine.ranks.sum_over_world(torch.stack([*squares.values()])).sqrt()


def autocast_to(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Products of float32 weights in the compute dtype."""
    if dtype is torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)
