"""What travels between pipeline stages: hidden states, and their gradients on the way back.

    stage p   (T', 1, D) of micro-batch n ->   stage p + 1
              <- (T', 1, D) gradients of micro-batch n

Rows differ in width, and Megatron lets the sender announce each width. That takes a message of its
own, for which the host waits three times. Here every stage has the same micro-batches in the same
order, so each computes the widths from its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vlmpack.packing import PackedBatch

NOTHING = [0, 0, 0]
"""Megatron's shape of what does not come."""


class LookedAhead:
    """Micro-batches one after the other, whose widths can be asked for before their turn."""

    def __init__(self, batches: Iterator[PackedBatch]) -> None:
        self.batches = batches
        self.waiting: deque[PackedBatch] = deque()
        self.widths: list[int] = []

    def __iter__(self) -> LookedAhead:
        return self

    def __next__(self) -> PackedBatch:
        if not self.waiting:
            self._look()
        return self.waiting.popleft()

    def width(self, number: int) -> int:
        """Slots of a micro-batch's whole row, counted from 0."""
        while len(self.widths) <= number:
            self._look()
        return self.widths[number]

    def _look(self) -> None:
        batch = next(self.batches)
        self.waiting.append(batch)
        self.widths.append(batch.input_ids.numel())


class StageExchange(P2PCommunicator):
    """Megatron's exchange between stages, with shapes known instead of sent."""

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroupCollection, batches: LookedAhead
    ) -> None:
        super().__init__(groups.pp, config)
        self.batches = batches
        shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self.shares = shares * config.context_parallel_size
        self.received = {"forward": count(), "backward": count()}
        self.sent = {"forward": count(), "backward": count()}

    def _shape(self, number: int) -> list[int]:
        """(T', 1, D) of a micro-batch."""
        return [self.batches.width(number) // self.shares, 1, self.config.hidden_size]

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int], list[int]]:
        """Shapes of what comes next from the stage before and from the one behind."""
        for way, tensor in (("forward", tensor_send_next), ("backward", tensor_send_prev)):
            if tensor is not None:
                number = next(self.sent[way])
                assert [*tensor.shape] == self._shape(number), (way, number, tensor.shape)
        forward = self._shape(next(self.received["forward"])) if recv_prev else NOTHING
        backward = self._shape(next(self.received["backward"])) if recv_next else NOTHING
        return forward, backward


def stage_exchange(
    config: TransformerConfig, groups: ProcessGroupCollection, batches: LookedAhead
) -> dict[str, Any]:
    """Arguments for Megatron's schedule; none without stages."""
    if config.pipeline_model_parallel_size == 1:
        return {}
    known = StageExchange(config, groups, batches)
    return {"p2p_communicator": known, "pg_collection": groups}
