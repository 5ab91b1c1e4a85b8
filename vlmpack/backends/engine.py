"""What the trainer asks of an engine, in the shape of Megatron's schedules.

A forward step takes (data_iterator, model) and returns the model's output and a loss function; the
loss function maps the output to (loss sum, number of label tokens, sums to report). The engine
runs the steps of one optimizer step, accumulates gradients of the *sum*, and hands the sums back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vlmpack.packing import Batch

LossFunction = Callable[[Tensor], tuple[Tensor, int, dict[str, Tensor]]]
"""Output -> (loss sum to differentiate, label tokens, detached sums to report)."""

ForwardStep = Callable[[Iterator[Batch], nn.Module], tuple[Tensor, LossFunction]]
"""Megatron's forward_step_func."""


class Engine(Protocol):
    """A model that can be trained, with whatever parallelism the engine knows."""

    device: torch.device
    description: dict[str, str]
    """What was chosen (engine, dtype, attention, sharding ...), for the log and the report."""

    @property
    def module(self) -> nn.Module:
        """What forward steps call with a batch."""
        ...

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Trainable parameters under transformers' names, in a fixed order."""
        ...

    def forward_backward(
        self,
        forward_step: ForwardStep,
        data_iterator: Iterator[Batch],
        *,
        num_microbatches: int,
        forward_only: bool = False,
    ) -> list[dict[str, Tensor]]:
        """Run the micro-batches of one optimizer step; the sums that the loss functions report."""
        ...

    def scale_gradients(self, scale: Tensor) -> None:
        """Multiply all gradients by a 0-d tensor on the device, without reading it."""
        ...

    def clip_gradients(self, max_norm: float | None) -> Tensor:
        """Global L2 norm of all gradients (0-d, on the device); clipped to `max_norm` if given."""
        ...

    def full_tensor(self, value: Tensor) -> Tensor:
        """A parameter, gradient or moment as one whole CPU tensor. Collective."""
        ...

    def like_parameter(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """A whole CPU tensor, laid out as `parameter` is (device, shards)."""
        ...

    def export(self, folder: Path, *, processor_from: Path, dtype: torch.dtype | None) -> None:
        """Write a folder that transformers' `from_pretrained` loads. Collective."""
        ...

    def generation(self) -> AbstractContextManager[Any]:
        """The bare transformers model, in eval mode and with stock attention, for generation."""
        ...
