"""Mamba-2 in Megatron's decoder: our recurrence under the names of Megatron's own module.

    in_proj (columns over TP)    gate z | x | B | C | dt, of this rank's heads and groups
    short convolution            of x, B and C, segment by segment
    scan                         segment by segment
    norm of the gated groups, out_proj (rows over TP)

Heads are independent of one another from the convolution to the scan, and groups of heads from
there to the norm. So tensor parallelism splits groups. Under context parallelism heads are split
once more, as in `delta_net`, and each rank runs the whole row for its own. Where a TP rank has
fewer groups than CP ranks, several ranks get copies of a group's B and C and run different heads of
it. The gate and the norm are computed per slot, where all heads of a group are.

Megatron's own module needs mamba-ssm, which needs a GPU, and before 0.18 knows no packed rows.

Shapes: T slots of the row, T' of this CP rank; H heads of width P and G groups on this TP rank; N
width of the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn
from torch.nn.functional import silu

from vlmpack.backends.mcore.attention import RowParams
from vlmpack.backends.mcore.collectives import heads_to_slots, slots_to_heads
from vlmpack.backends.mcore.weights.dims import MambaDims
from vlmpack.recurrence import RecurrenceChoice, StepSize


@dataclass(frozen=True)
class MambaSubmodules:
    """What a Mamba-2 is made of, in Megatron's names."""

    in_proj: ModuleSpec | type
    out_proj: ModuleSpec | type


def mamba_spec(dims: MambaDims, recurrence: RecurrenceChoice) -> ModuleSpec:
    """A layer's Mamba-2."""
    return ModuleSpec(
        module=PackedMamba2,
        params={"dims": dims, "recurrence": recurrence},
        submodules=MambaSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )


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


class PackedMamba2(MegatronModule):
    """What stands where a Megatron layer has `self_attention`."""

    def __init__(
        self,
        config: Any,
        submodules: MambaSubmodules,
        layer_number: int,
        *,
        dims: MambaDims,
        recurrence: RecurrenceChoice,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.choice, self.cp_group = recurrence, pg_collection.cp
        self.head_dim, self.state, self.least_step = dims.head_dim, dims.state, dims.least_step
        ranks = pg_collection.tp.size()
        heads, self.groups = dims.heads // ranks, dims.groups // ranks
        self.copies = max(1, self.cp_group.size() // self.groups)
        inner, written = dims.inner // ranks, dims.written // ranks
        self.widths = (inner, inner, written, written, heads)
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
        channels = inner + 2 * written
        self.conv1d = nn.Conv1d(
            channels, channels, dims.taps, groups=channels, bias=dims.conv_bias, **like
        )
        self.dt_bias = nn.Parameter(torch.empty(heads, **like))
        self.A_log = nn.Parameter(torch.empty(heads, **like))
        self.D = nn.Parameter(torch.empty(heads, **like))
        self.norm = GroupNorm(inner, self.groups, config.layernorm_epsilon, **like)
        self.out_proj = build_module(
            submodules.out_proj,
            dims.inner,
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
        gate, x, write, read, step = mixed[:, 0].split(self.widths, dim=-1)
        order = packed_seq_params.natural_order
        if order is None:
            found = self._scanned((x, write, read, step), packed_seq_params)
        else:
            held = (x, self._copied(write, -1), self._copied(read, -1), step)
            mixers = slots_to_heads(held, order, group=self.cp_group)
            found = self._scanned(mixers, packed_seq_params)
            found = heads_to_slots(found, order, group=self.cp_group)
        return self.out_proj(self.norm(found, gate)[:, None])  # type: ignore[no-any-return]

    def _copied(self, part: Tensor, dim: int) -> Tensor:
        """What groups write, read or filter with, once for each CP rank that runs some of their
        heads."""
        if self.copies == 1:
            return part
        groups = part.unflatten(dim, (self.groups, self.state))
        where = dim if dim >= 0 else dim - 1
        copied: Tensor = groups.repeat_interleave(self.copies, dim=where)
        return copied.flatten(where, where + 1)

    def _scanned(self, mixers: tuple[Tensor, ...], params: RowParams) -> Tensor:
        """(T, H P) of the whole row's x, B, C and raw steps, each (T, ...)."""
        row = params.segments
        assert row is not None
        *mixed, step = mixers
        filters, bias, (dt_bias, a_log, skip) = self._own_heads()
        together = torch.cat(mixed, dim=-1).transpose(0, 1)[None]
        together = self.choice.convolution.function(
            together, filters.squeeze(1), bias, row, activation="silu"
        )
        x, write, read = (
            part.unflatten(-1, (-1, width))
            for part, width in zip(
                together.transpose(1, 2).split([part.shape[-1] for part in mixed], dim=-1),
                (self.head_dim, self.state, self.state),
                strict=True,
            )
        )
        limits = (self.least_step, float("inf"))
        found = self.choice.scan.function(
            *(x, step[None], -a_log.float().exp(), write, read, row),
            skip=skip,
            step_size=StepSize(bias=dt_bias, softplus=True, limits=limits),
        )
        return found[0].flatten(1)

    def _own_heads(self) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """The filters and their bias, and what is one number a head (steps' biases, decays, skips),
        of the heads that this rank runs the row for."""
        each: list[Tensor] = [self.dt_bias, self.A_log, self.D]
        size, rank = self.cp_group.size(), self.cp_group.rank()
        filters, bias = self.conv1d.weight, self.conv1d.bias
        if size == 1:
            return filters, bias, each
        own = [part.chunk(size)[rank] for part in each]
        return self._own_channels(filters), None if bias is None else self._own_channels(bias), own

    def _own_channels(self, channels: Tensor) -> Tensor:
        """Those of x, B and C that this CP rank has."""
        size, rank = self.cp_group.size(), self.cp_group.rank()
        x, write, read = channels.split(self.widths[1:4])
        parts = (x, self._copied(write, 0), self._copied(read, 0))
        return torch.cat([part.chunk(size)[rank] for part in parts])
