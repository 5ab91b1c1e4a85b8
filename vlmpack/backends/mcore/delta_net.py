"""GatedDeltaNet in Megatron's decoder: our recurrence under the names of Megatron's own module.

    in_proj (columns over TP)    queries, keys, values | gate | rate | decay of this rank's heads
    short convolution            of queries, keys and values, segment by segment
    gated delta rule             segment by segment
    gated norm, out_proj (rows over TP)

Heads are independent of one another from the convolution to the norm, so tensor parallelism splits
them. Under context parallelism a rank has some tokens of every segment, but a state runs through
all of them. So heads are split once more, and each rank runs the whole row for its own.

    (T / CP, all heads)  -- all to all -->  (T, heads / CP)  -- all to all -->  (T / CP, all heads)

Megatron's own module needs flash-linear-attention, and has no context parallelism before 0.19. It
knows no packed rows in 0.16, and reads their boundaries on the host in 0.19.

Shapes: T slots of the row, T' of this CP rank; Hk heads of queries and keys, H of values on this TP
rank; K and V widths of a key and a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from vlmpack.backends.mcore.attention import RowParams
from vlmpack.backends.mcore.collectives import heads_to_slots, slots_to_heads
from vlmpack.backends.mcore.weights.dims import DeltaNetDims
from vlmpack.recurrence import RecurrenceChoice

SUMMED_OVER_TP = "summed_over_tp"
"""Attribute of a parameter that each tensor-parallel rank has a copy of and uses for its own heads:
its gradients there are parts of a sum, with sequence parallelism and without."""


@dataclass(frozen=True)
class DeltaNetSubmodules:
    """What a GatedDeltaNet is made of, in Megatron's names."""

    in_proj: ModuleSpec | type
    out_norm: ModuleSpec | type
    out_proj: ModuleSpec | type


class PackedGatedDeltaNet(MegatronModule):
    """What stands where a Megatron layer has `self_attention`."""

    def __init__(
        self,
        config: Any,
        submodules: DeltaNetSubmodules,
        layer_number: int,
        *,
        dims: DeltaNetDims,
        recurrence: RecurrenceChoice,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.choice, self.cp_group = recurrence, pg_collection.cp
        ranks = pg_collection.tp.size()
        self.key_width, self.value_width = dims.key_width, dims.value_width
        keys, values = dims.keys // ranks, dims.values // ranks
        heads = dims.value_heads // ranks
        self.widths = (keys, keys, values, values, heads, heads)
        linear = {
            "config": config,
            "bias": False,
            "is_expert": False,
            "tp_group": pg_collection.tp,
        }
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(self.widths) * ranks,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **linear,
        )
        like = {"dtype": config.params_dtype}
        channels = 2 * keys + values
        self.conv1d = nn.Conv1d(channels, channels, dims.taps, groups=channels, bias=False, **like)
        self.dt_bias = nn.Parameter(torch.empty(heads, **like))
        self.A_log = nn.Parameter(torch.empty(heads, **like))
        self.out_norm = build_module(
            submodules.out_norm,
            config=config,
            hidden_size=self.value_width,
            eps=config.layernorm_epsilon,
        )
        self.out_norm.weight.sequence_parallel = False
        setattr(self.out_norm.weight, SUMMED_OVER_TP, True)
        self.out_proj = build_module(
            submodules.out_proj,
            dims.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **linear,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: RowParams,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(T'', 1, D) -> (T'', 1, D) and no bias, T'' = T', or this TP rank's share of them.

        Raises:
            ValueError: a mask, or params that are not ours: samples would mix.
        """
        if attention_mask is not None or not isinstance(packed_seq_params, RowParams):
            raise ValueError("packed rows need RowParams and no attention mask")
        mixed, _ = self.in_proj(hidden_states)
        query, key, value, gate, rate, decay = mixed[:, 0].split(self.widths, dim=-1)
        mixers: tuple[Tensor, ...] = (query, key, value, rate, decay)
        order = packed_seq_params.natural_order
        if order is not None:
            mixers = slots_to_heads(mixers, order, group=self.cp_group)
        found = self._mixed(mixers, packed_seq_params)
        if order is not None:
            found = heads_to_slots(found, order, group=self.cp_group)
        normed = self.out_norm(found.unflatten(-1, (-1, self.value_width)))
        gated = normed.flatten(1) * silu(gate.float())
        return self.out_proj(gated.to(mixed.dtype)[:, None])  # type: ignore[no-any-return]

    def _mixed(self, mixers: tuple[Tensor, ...], params: RowParams) -> Tensor:
        """(T, H V) of the whole row's queries, keys, values, rates and decays, each (T, ...)."""
        row = params.segments
        assert row is not None
        query, key, value, rate, decay = mixers
        filters, dt_bias, a_log = self._own_heads()
        together = torch.cat((query, key, value), dim=-1).transpose(0, 1)[None]
        together = self.choice.convolution.function(
            together, filters.squeeze(1), None, row, activation="silu"
        )
        widths = [part.shape[-1] for part in (query, key, value)]
        query, key, value = (
            part.unflatten(-1, (-1, width))
            for part, width in zip(
                together.transpose(1, 2).split(widths, dim=-1),
                (self.key_width, self.key_width, self.value_width),
                strict=True,
            )
        )
        log_decay = -a_log.float().exp() * softplus(decay.float() + dt_bias)
        found = self.choice.delta_rule.function(
            query, key, value, log_decay[None], rate.sigmoid()[None], row, normalize=True
        )
        return found[0].flatten(1)

    def _own_heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """The filters, and what makes decays, of the heads that this rank runs the row for."""
        filters = self.conv1d.weight
        size, rank = self.cp_group.size(), self.cp_group.rank()
        if size == 1:
            return filters, self.dt_bias, self.A_log
        parts = filters.split(self.widths[:3])
        own = torch.cat([part.chunk(size)[rank] for part in parts])
        return own, self.dt_bias.chunk(size)[rank], self.A_log.chunk(size)[rank]
