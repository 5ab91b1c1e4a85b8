"""Layers that carry state in Megatron's decoder: our recurrences under Megatron's own names.

A GatedDeltaNet:

    in_proj (columns over TP)    queries, keys, values | gate | rate | decay of this rank's heads
    short convolution            of queries, keys and values, segment by segment
    gated delta rule             segment by segment
    gated norm, out_proj (rows over TP)

A Mamba-2:

    in_proj (columns over TP)    gate z | x | B | C | dt, of this rank's heads and groups
    short convolution            of x, B and C, segment by segment
    scan                         segment by segment
    norm of the gated groups, out_proj (rows over TP)

Heads are independent of one another from the convolution to the norm, so tensor parallelism splits
them. Mamba-2's norm is of a group of heads, so there it splits groups. Under context parallelism a
rank has some tokens of every segment, but a state runs through all of them. So heads are split once
more, and each rank runs the whole row for its own.

    (T / CP, all heads)  -- all to all -->  (T, heads / CP)  -- all to all -->  (T / CP, all heads)

Where a TP rank has fewer groups than CP ranks, several ranks get copies of a group's B and C and
run different heads of it. The gate and the norm are computed per slot, where all heads of a group
are.

Megatron's own GatedDeltaNet needs flash-linear-attention, and has no context parallelism before
0.19. It knows no packed rows in 0.16, and reads their boundaries on the host in 0.19. Its Mamba-2
needs mamba-ssm, which needs a GPU, and before 0.18 knows no packed rows.

Shapes:

- T slots of the row, T' of this CP rank.
- GatedDeltaNet, on this TP rank: Hk heads of queries and keys, H heads of values. A key has width
  K, a value width V.
- Mamba-2, on this TP rank: H heads of width P, G groups. The state has width N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from vlmpack.backends.collectives import heads_to_slots, slots_to_heads
from vlmpack.backends.mcore.attention import RowParams
from vlmpack.backends.mcore.weights.dims import DeltaNetDims, MambaDims
from vlmpack.recurrence import RecurrenceChoice, RowSegments, StepSize, on_this_path

SUMMED_OVER_TP = "summed_over_tp"
"""Attribute of a parameter that each tensor-parallel rank has a copy of and uses for its own heads:
its gradients there are parts of a sum, with sequence parallelism and without."""


class PackedMixer(MegatronModule):
    """The mixer in the place of a Megatron layer's `self_attention`.

    Args:
        widths: channels of each part of in_proj's output on this TP rank, numbers of a head last.
        head_widths: channels of a head in each part that the convolution takes.
    """

    GATE: ClassVar[int]
    """Which of the parts is the gate, that no other rank needs."""
    CONVOLVED: ClassVar[slice]
    """Which of the parts the convolution takes."""
    PER_HEAD: ClassVar[tuple[str, ...]]
    """The parameters that are a number a head."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *,
        recurrence: RecurrenceChoice,
        groups: Any,
        widths: tuple[int, ...],
        head_widths: tuple[int, ...],
        taps: int,
        conv_bias: bool = False,
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.choice = layer_number, recurrence
        self.widths, self.head_widths = widths, head_widths
        self.cp_group, self.tp_group = groups.cp, groups.tp
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            sum(widths) * groups.tp.size(),
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="fc1",
            tp_group=groups.tp,
        )
        channels, dtype = sum(widths[self.CONVOLVED]), config.params_dtype
        self.conv1d = nn.Conv1d(
            channels, channels, taps, groups=channels, bias=conv_bias, dtype=dtype
        )
        for name in self.PER_HEAD:
            setattr(self, name, nn.Parameter(torch.empty(widths[-1], dtype=dtype)))

    def output_layer(self, channels: int) -> RowParallelLinear:
        """The layer after the norm, for so many channels on all TP ranks."""
        return RowParallelLinear(
            channels,
            self.config.hidden_size,
            config=self.config,
            init_method=self.config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="fc2",
            tp_group=self.tp_group,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: RowParams,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(T'', 1, D) -> (T'', 1, D) and no bias, T'' = T', or this TP rank's part of them.

        Raises:
            ValueError: a mask, or params that are not ours: samples would mix.
        """
        if attention_mask is not None or not isinstance(packed_seq_params, RowParams):
            raise ValueError("packed rows need RowParams and no attention mask")
        mixed, _ = self.in_proj(hidden_states)
        parts = [*mixed[:, 0].split(self.widths, dim=-1)]
        gate, order = parts.pop(self.GATE), packed_seq_params.natural_order
        row = packed_seq_params.segments
        assert row is not None
        if order is None:
            states = self._mixed(parts, row)
        else:
            mixers = slots_to_heads(self._for_ranks(parts), order, group=self.cp_group)
            states = heads_to_slots(self._mixed(mixers, row), order, group=self.cp_group)
        return self.out_proj(self._gated(states, gate)[:, None])  # type: ignore[no-any-return]

    def _mixed(self, mixers: Sequence[Tensor], row: RowSegments) -> Tensor:
        """(T, H V) or (T, H P) of the whole row's parts but the gate, each (T, ...)."""
        raise NotImplementedError

    def _gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """What goes into out_proj: (T', ...) of the gate's dtype."""
        raise NotImplementedError

    def _for_ranks(self, parts: Sequence[Tensor], dim: int = -1) -> list[Tensor]:
        """The parts, such that each can be cut into one piece for each CP rank."""
        del dim
        return [*parts]

    def _convolved(
        self, parts: Sequence[Tensor], row: RowSegments
    ) -> tuple[Iterator[Tensor], list[Tensor]]:
        """(1, T, heads, width) of each part behind it, and what is one number a head."""
        filters, bias, per_head = self._own_heads()
        together = torch.cat([*parts], dim=-1).transpose(0, 1)[None]
        together = on_this_path(self.choice).convolution.function(
            together, filters.squeeze(1), bias, row, activation="silu"
        )
        apart = together.transpose(1, 2).split([part.shape[-1] for part in parts], dim=-1)
        heads = zip(apart, self.head_widths, strict=True)
        return (part.unflatten(-1, (-1, width)) for part, width in heads), per_head

    def _own_heads(self) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """The filters and their bias, and what is one number a head, of the heads that this CP rank
        runs the row for."""
        each: list[Tensor] = [getattr(self, name) for name in self.PER_HEAD]
        size, rank = self.cp_group.size(), self.cp_group.rank()
        filters, bias = self.conv1d.weight, self.conv1d.bias
        if size == 1:
            return filters, bias, each

        def own(channels: Tensor) -> Tensor:
            parts = self._for_ranks(channels.split(self.widths[self.CONVOLVED]), 0)
            return torch.cat([part.chunk(size)[rank] for part in parts])

        mine = [part.chunk(size)[rank] for part in each]
        return own(filters), None if bias is None else own(bias), mine


class PackedGatedDeltaNet(PackedMixer):
    """The gated delta rule."""

    GATE, CONVOLVED, PER_HEAD = 3, slice(0, 3), ("dt_bias", "A_log")

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *,
        dims: DeltaNetDims,
        recurrence: RecurrenceChoice,
        norm: Callable[..., nn.Module],
        pg_collection: Any,
        **_: Any,
    ) -> None:
        ranks = pg_collection.tp.size()
        keys, values = dims.keys // ranks, dims.values // ranks
        heads = dims.value_heads // ranks
        super().__init__(
            config,
            layer_number,
            recurrence=recurrence,
            groups=pg_collection,
            widths=(keys, keys, values, values, heads, heads),
            head_widths=(dims.key_width, dims.key_width, dims.value_width),
            taps=dims.taps,
        )
        self.out_norm = norm(
            config=config, hidden_size=dims.value_width, eps=config.layernorm_epsilon
        )
        weight: Any = self.out_norm.weight
        weight.sequence_parallel = False
        setattr(weight, SUMMED_OVER_TP, True)
        self.out_proj = self.output_layer(dims.values)

    def _gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        normed = self.out_norm(mixed.unflatten(-1, (-1, self.head_widths[-1])))
        gated: Tensor = normed.flatten(1) * silu(gate.float())
        return gated.to(gate.dtype)

    def _mixed(self, mixers: Sequence[Tensor], row: RowSegments) -> Tensor:
        """The delta rule of queries, keys, values, rates and decays."""
        *mixed, rate, decay = mixers
        (query, key, value), (dt_bias, a_log) = self._convolved(mixed, row)
        log_decay = -a_log.float().exp() * softplus(decay.float() + dt_bias)
        output = on_this_path(self.choice).delta_rule.function(
            query, key, value, log_decay[None], rate.sigmoid()[None], row, normalize=True
        )
        return output.squeeze(0).flatten(1)


class GroupNorm(nn.Module):
    """y = weight * (x / rms(x of its group)), x gated before, in float32 or wider."""

    def __init__(self, width: int, groups: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """(T', H P) and the gate of the same shape -> the same, in the dtype of `x`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        gated = (x.to(wide) * silu(gate.to(wide))).unflatten(-1, (self.groups, -1))
        scaled = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        normed: Tensor = self.weight * scaled.flatten(-2).to(x.dtype)
        return normed


class PackedMamba2(PackedMixer):
    """Mamba-2's scan."""

    GATE, CONVOLVED, PER_HEAD = 0, slice(1, 4), ("dt_bias", "A_log", "D")

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *,
        dims: MambaDims,
        recurrence: RecurrenceChoice,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        ranks = pg_collection.tp.size()
        inner, written = dims.inner // ranks, dims.written // ranks
        super().__init__(
            config,
            layer_number,
            recurrence=recurrence,
            groups=pg_collection,
            widths=(inner, inner, written, written, dims.heads // ranks),
            head_widths=(dims.head_dim, dims.state, dims.state),
            taps=dims.taps,
            conv_bias=dims.conv_bias,
        )
        self.least_step, groups = dims.least_step, dims.groups // ranks
        self.copies = max(1, self.cp_group.size() // groups)
        self.norm = GroupNorm(inner, groups, config.layernorm_epsilon, config.params_dtype)
        self.out_proj = self.output_layer(dims.inner)

    def _gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        gated: Tensor = self.norm(mixed, gate)
        return gated

    def _for_ranks(self, parts: Sequence[Tensor], dim: int = -1) -> list[Tensor]:
        x, write, read, *rest = parts
        return [x, self._copied(write, dim), self._copied(read, dim), *rest]

    def _copied(self, part: Tensor, dim: int) -> Tensor:
        """What groups write, read or filter with, once for each CP rank that runs some of their
        heads."""
        if self.copies == 1:
            return part
        groups = part.unflatten(dim, (self.norm.groups, self.head_widths[-1]))
        where = dim if dim >= 0 else dim - 1
        copied: Tensor = groups.repeat_interleave(self.copies, dim=where)
        return copied.flatten(where, where + 1)

    def _mixed(self, mixers: Sequence[Tensor], row: RowSegments) -> Tensor:
        """The scan of x, B, C and raw steps."""
        *mixed, step = mixers
        (x, write, read), (dt_bias, a_log, skip) = self._convolved(mixed, row)
        limits = (self.least_step, float("inf"))
        output = on_this_path(self.choice).scan.function(
            *(x, step[None], -a_log.float().exp(), write, read, row),
            skip=skip,
            step_size=StepSize(bias=dt_bias, softplus=True, limits=limits),
        )
        return output.squeeze(0).flatten(1)
