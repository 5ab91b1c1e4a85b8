"""A stage in Megatron's DDP, and which of its parameters are trained.

The stage decides how gradients are bucketed, which communication overlaps compute, and what
tensor-parallel ranks sum in addition. What is trained follows from the policy, by transformers'
names.

What travels between stages are hidden states, and their gradients on the way back.

    stage p   (T', 1, D) of micro-batch n ->   stage p + 1
              <- (T', 1, D) gradients of micro-batch n

Rows differ in width, and Megatron lets the sender announce each width. That takes a message of its
own, for which the host waits three times. Here every stage has the same micro-batches in the same
order, so each computes the widths from its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count, groupby
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from vlmpack.backends.mcore.groups import megatron_on_cpu
from vlmpack.backends.mcore.layout import LocalParameter
from vlmpack.backends.mcore.mixers import SUMMED_OVER_TP
from vlmpack.backends.mcore.model import MegatronVLM
from vlmpack.backends.mcore.optimizer import LR_SCALE
from vlmpack.backends.mcore.overlap import OrderedReduction, overlaps
from vlmpack.backends.policy import TrainingPolicy
from vlmpack.errors import CapabilityError
from vlmpack.families.base import ModulePaths
from vlmpack.packing import PackedBatch
from vlmpack.recipe.schema import ParallelismSection

IN_PLACE = 1 << 20
"""Elements from which a range of gradients is summed where it lies; shorter ones share a copy."""


class Stage:
    """A stage in Megatron's DDP, its gradient buckets, and communication that overlaps compute."""

    def __init__(self, model: MegatronVLM, split: ParallelismSection, device: torch.device) -> None:
        config, overlap = model.config, overlaps(split, device)
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=split.distributed_optimizer,
                average_in_collective=False,
                overlap_grad_reduce=overlap,
                overlap_param_gather=overlap and split.distributed_optimizer,
            ),
            model,
            pg_collection=model.groups,
        )
        self.in_order = OrderedReduction(self.ddp) if overlap else None
        self.gathers = None
        if overlap and split.distributed_optimizer:
            self.gathers = model.overlap_gathers(self.ddp)
        self.tp = model.groups.tp
        self.find_gradients_over_tp()
        config.no_sync_func = self.ddp.no_sync
        config.finalize_model_grads_func = self.finalize

    def find_gradients_over_tp(self) -> None:
        """Decide by the marks of parameters which gradients TP ranks sum."""
        summed = gradients_over_tp(self.ddp) if self.tp.size() > 1 else []
        self.over_tp = [part for part in summed if part.numel() >= IN_PLACE]
        self.small_over_tp = [part for part in summed if part.numel() < IN_PLACE]

    def zero_gradients(self) -> None:
        """Drop the accumulated gradients."""
        if self.in_order is not None:
            self.in_order.reset()
        self.ddp.zero_grad_buffer()

    def finalize(self, model: list[nn.Module], num_tokens: Tensor | None, **arguments: Any) -> None:
        """Reduce gradients over replicas and stages, and those that TP ranks sum also over TP
        ranks.

        TP ranks sum the gradients of the tower, whose images they split, and of copies that each
        used for its own heads. `num_tokens` is not used, because the trainer divides once, by a
        count that it never reads on the host.
        """
        self.finish_gathers()
        if self.in_order is not None:
            self.in_order.start_rest()
        finalize_model_grads(model, None, **arguments)
        for gradients in self.over_tp:
            dist.all_reduce(gradients, group=self.tp)
        if self.small_over_tp:
            flat = torch.cat(self.small_over_tp)
            dist.all_reduce(flat, group=self.tp)
            sizes = [part.numel() for part in self.small_over_tp]
            torch._foreach_copy_(self.small_over_tp, list(flat.split(sizes)))

    def gather(self) -> None:
        """Let the next forward pass gather the updated parameters as it goes. Without overlap the
        optimizer has gathered them."""
        if self.gathers is not None:
            self.gathers.start()

    def finish_gathers(self) -> None:
        """Have all parameters here, for readers outside of the forward pass. Collective."""
        if self.gathers is not None:
            with megatron_on_cpu():
                self.gathers.finish()


def gradients_over_tp(ddp: DistributedDataParallel) -> list[Tensor]:
    """The reduced gradients of this rank that TP ranks also sum.

    These belong to the tower, whose images the ranks split, and to copies that each rank used for
    its own heads. With the distributed optimizer they are a rank's part of each bucket, otherwise
    all of it.

    Parameters lie in buckets in the order of registration, so the tower is one range of each
    bucket. There may be padding between neighbours.
    """
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    gradients: list[Tensor] = []
    for group in ddp.bucket_groups:
        for bucket in group.buckets:
            low, high = 0, bucket.grad_data.numel()
            if ddp.ddp_config.use_distributed_optimizer:
                ranks = group.intra_distributed_optimizer_instance_group
                low, high = (high // ranks.size() * n for n in (ranks.rank(), ranks.rank() + 1))
            for start, stop in _ranges(bucket, names):
                if max(low, start) < min(high, stop):
                    gradients.append(bucket.grad_data[max(low, start) : min(high, stop)])
    return gradients


def _ranges(bucket: Any, names: dict[int, str]) -> Iterator[tuple[int, int]]:
    """First and last element of neighbours in a bucket that TP ranks sum."""

    def is_summed(parameter: Any) -> bool:
        return names[id(parameter)].startswith("vision.") or hasattr(parameter, SUMMED_OVER_TP)

    start = bucket.grad_data.storage_offset()
    for summed, run in groupby(bucket.params_list, key=is_summed):
        places = [(p.main_grad.storage_offset() - start, p.numel()) for p in run]
        if summed:
            yield places[0][0], sum(places[-1])


def refuse_adapters(policy: TrainingPolicy, *, transformer_engine: bool) -> None:
    """Raise CapabilityError for adapters that this engine has none of."""
    lora = policy.lora
    if lora is None:
        return
    wrong = {
        f"trainable.lora.dropout is {lora.dropout}": lora.dropout > 0,
        f"trainable.lora.quantize is {lora.quantize}": lora.quantize != "none",
        "model.attention is transformer_engine": transformer_engine,
    }
    for reason in (what for what, is_wrong in wrong.items() if is_wrong):
        raise CapabilityError(f"{reason}: adapters of the mcore engine cannot have that")


def mark_trained(
    parameters: Iterable[LocalParameter], policy: TrainingPolicy, paths: ModulePaths
) -> None:
    """Set `requires_grad` of a stage's parameters, and the factor of their learning rate.

    All pieces of a parameter (queries, keys and values, say) belong to one component.
    """
    for local in parameters:
        parameter = local.parameter
        said = {
            policy.of_parameter(piece.box.name, parameter.ndim, paths) for piece in local.pieces
        }
        assert len(said) == 1
        (only,) = said
        parameter.requires_grad_(only.trains)
        setattr(parameter, LR_SCALE, only.lr_scale)


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
        slices = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self.slices = slices * config.context_parallel_size
        self.received = {"forward": count(), "backward": count()}
        self.sent = {"forward": count(), "backward": count()}

    def _shape(self, number: int) -> list[int]:
        """(T', 1, D) of a micro-batch."""
        return [self.batches.width(number) // self.slices, 1, self.config.hidden_size]

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
