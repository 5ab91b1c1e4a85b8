"""Megatron's configuration of a language model, from the model folder's config.

Everything that packing and per-token losses need is set here and nowhere else. That is
`variable_seq_lengths`, `calculate_per_token_loss`, no dropout, and no fused residual ops that
assume one sequence a row.

The config also names the parts of a layer that are ours:

`GatedSelfAttention` has a gate on its output, in the order of transformers' weights. Megatron
keeps, of each query group, all its queries and then all its gates. transformers' `q_proj` has each
head's query followed by its gate. In that order the rows of a group are one run each of `q_proj`,
`k_proj` and `v_proj`, and so are those of adapters.

    rows of one group    q0 g0 q1 g1 ... | k | v

A layer of one part is a mixer or an MLP alone, with its norm and its residual sum. The other part
is empty, as in Megatron's own hybrids.

    kinds      linear_attention   mlp        full_attention   moe
    layer      norm, mixer, +     norm, MLP, +   norm, attention, +   norm, experts, +
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn

from vlmpack.alignment import round_up
from vlmpack.attention import VarlenAttention
from vlmpack.backends.fused import FusedOps
from vlmpack.backends.mcore.attention import PackedCoreAttention
from vlmpack.backends.mcore.mixers import PackedGatedDeltaNet, PackedMamba2
from vlmpack.backends.mcore.router import BiasedRouter, PackedRouter
from vlmpack.backends.mcore.versions import (
    hide_advice_to_us,
    routers_need_no_transformer_engine,
    with_parts,
)
from vlmpack.backends.mcore.weights.dims import ExpertDims, LanguageDims
from vlmpack.backends.row_operators import WIDEST, NormForm
from vlmpack.errors import CapabilityError
from vlmpack.kernel_operators import is_plain
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.recurrence import RecurrenceChoice


class GatedSelfAttention(SelfAttention):
    """Megatron's self-attention where `attention_output_gate` is set."""

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(T', 1, D) -> queries (T', 1, Hq, d), keys and values (T', 1, Hkv, d), and the gates."""
        mixed, _bias = self.linear_qkv(hidden_states)
        width, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        heads = 2 * self.num_attention_heads_per_partition // groups
        both, key, value = mixed.unflatten(-1, (groups, -1)).split(
            (heads * width, width, width), dim=-1
        )
        query, gate = both.reshape(*both.shape[:2], -1, 2 * width).chunk(2, dim=-1)
        return self.q_layernorm(query), self.k_layernorm(key), value, gate


PLAIN = NormForm(offset=0.0, rounds_first=True)
"""As Llama and Qwen have it up to Qwen3."""


class RMSNorm(nn.Module):
    """y = (offset + weight) * (x / rms(x)), the mean of squares in float32 or wider (1910.07467).

    Megatron's own wrapper of torch's norm refuses sequence parallelism. The weight has the flag
    `sequence_parallel`, which makes Megatron sum its gradient over the TP ranks. Each of these sees
    only its part of the tokens.

    Args:
        ops: what runs it as one kernel; None for torch's operators one by one, which also run rows
            that are too wide for the kernel.
        form: the offset, and where it rounds.
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-6,
        ops: FusedOps | None = None,
        form: NormForm = PLAIN,
        **_: Any,
    ) -> None:
        super().__init__()
        self.ops, self.form = ops if hidden_size <= WIDEST else None, form
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) -> the same shape and dtype."""
        if self.ops is not None and not is_plain():
            return self.ops.norm(x, self.weight, self.eps, self.form)
        scaled = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + self.eps)
        if self.form.rounds_first:
            return self.weight * scaled.to(x.dtype)
        return ((self.form.offset + self.weight.to(scaled.dtype)) * scaled).to(x.dtype)


MIXER = ("input_layernorm", "self_attention", "self_attn_bda")
MLP = ("pre_mlp_layernorm", "mlp", "mlp_bda")

_MIXERS = ("linear_attention", "full_attention")
"""Kinds that are a mixer; the others are an MLP."""


def one_part(layer: ModuleSpec, kind: str) -> ModuleSpec:
    """A layer with only the part that its kind has."""
    nothing = TransformerLayerSubmodules()
    gone = MLP if kind in _MIXERS else MIXER
    made: ModuleSpec = with_parts(layer, **{name: getattr(nothing, name) for name in gone})
    return made


def has_mixer(layer: nn.Module) -> bool:
    """Whether a layer mixes tokens."""
    return not isinstance(layer.self_attention, IdentityOp)


def transformer_config(
    dims: LanguageDims,
    model: ModelSection,
    sizes: ParallelismSection,
    *,
    dtype: torch.dtype,
    fused_activation: bool = False,
) -> TransformerConfig:
    """Megatron's config.

    Args:
        fused_activation: whether SwiGLU is one kernel, which Megatron has torch compile.
    """
    hide_advice_to_us()
    return TransformerConfig(
        num_layers=dims.layers,
        hidden_size=dims.hidden,
        num_attention_heads=dims.heads,
        num_query_groups=dims.groups,
        kv_channels=dims.head_dim,
        ffn_hidden_size=dims.intermediate,
        gated_linear_unit=dims.gated_mlp,
        activation_func=torch.nn.functional.silu if dims.gated_mlp else squared_relu,
        normalization="RMSNorm",
        layernorm_epsilon=dims.norm_eps,
        add_bias_linear=False,
        add_qkv_bias=dims.family.qkv_bias,
        qk_layernorm=dims.family.qk_norm,
        attention_output_gate=dims.family.output_gate,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        context_parallel_size=sizes.context,
        sequence_parallel=sizes.sequence,
        # Packed rows differ in width from micro-batch to micro-batch; `pipeline` knows the widths.
        variable_seq_lengths=True,
        batch_p2p_sync=False,  # for old versions of torch; the host would wait after each message
        moe_token_dispatcher_type="alltoall",  # the one that takes rows of different widths
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        # Every weight is read from the model folder.
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=fused_activation and dims.gated_mlp,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **_experts(dims.experts, sizes, model.router_aux_loss_coef),
    )


def _experts(
    experts: ExpertDims | None, sizes: ParallelismSection, aux_loss: float
) -> dict[str, Any]:
    """Megatron's fields for a mixture of experts: no token is dropped, no capacity."""
    if experts is None:
        return {}
    routers_need_no_transformer_engine()
    settings: dict[str, Any] = {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.intermediate,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": aux_loss,
        "moe_router_pre_softmax": False,
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": 1,
    }
    if experts.shared:
        settings["moe_shared_expert_intermediate_size"] = experts.shared
        settings["moe_shared_expert_gate"] = experts.shared_gate
    if experts.score == "sigmoid":
        if aux_loss:
            raise CapabilityError(
                f"model.router_aux_loss_coef: {aux_loss}, but experts that are chosen by a sigmoid "
                f"and a bias have no load-balancing loss in transformers. Leave it out"
            )
        settings["moe_router_score_function"] = experts.score
        settings["moe_router_topk_scaling_factor"] = experts.scaling
        settings["moe_router_dtype"] = "fp32"
    return settings


def decoder_spec(
    config: TransformerConfig,
    dims: LanguageDims,
    varlen: VarlenAttention | None,
    fused: FusedOps | None = None,
    recurrence: RecurrenceChoice | None = None,
) -> TransformerBlockSubmodules:
    """This stage's layers.

    Args:
        varlen: attention over whole rows in Megatron's local layers. None for Transformer Engine's
            layers and attention, which have their own norms.

    Raises:
        CapabilityError: such layers are combined with Transformer Engine's.
    """
    build: Callable[..., ModuleSpec]
    norm: Any
    if varlen is not None:
        norm = ModuleSpec(module=RMSNorm, params={"ops": fused, "form": norm_form(dims)})
        biased = dims.experts is not None and dims.experts.score == "sigmoid"
        router = BiasedRouter if biased else PackedRouter
        build = partial(_local_layer, varlen, norm, gated=dims.family.output_gate, router=router)
    elif dims.family.output_gate or dims.state_kinds or norm_form(dims) != PLAIN:
        raise CapabilityError(
            "model.attention: transformer_engine has none of this model's layers; use auto, "
            "segments, torch_varlen or flash_attn"
        )
    else:
        from vlmpack.backends.mcore import transformer_engine  # needs CUDA

        build, norm = transformer_engine.transformer_engine_layer, transformer_engine.TENorm
    rank = parallel_state.get_pipeline_model_parallel_rank()
    first = get_transformer_layer_offset(config, pp_rank=rank)
    experts = dict.fromkeys(dims.experts.layers, dims.experts.count) if dims.experts else {}
    layers = [
        build(num_experts=experts.get(number), qk_norm=dims.family.qk_norm)
        for number in range(first, first + get_num_layers_to_build(config, pp_rank=rank))
    ]
    stateful = _stateful(dims, recurrence, fused)
    for place, layer in enumerate(layers):
        number = first + place
        mixer = stateful.get(number)
        whole = layer if mixer is None else with_parts(layer, self_attention=mixer)
        layers[place] = one_part(whole, dims.kinds[number]) if dims.kinds else whole
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def norm_form(dims: LanguageDims) -> NormForm:
    """How the model's norms are computed, except the one after a delta rule."""
    return NormForm(dims.family.norm_offset, rounds_first=dims.family.norm_rounds_first)


def _stateful(
    dims: LanguageDims, recurrence: RecurrenceChoice | None, fused: FusedOps | None
) -> dict[int, ModuleSpec]:
    """What layers that carry state have instead of attention, by number."""
    specs: dict[int, ModuleSpec] = {}
    if recurrence is None:
        return specs
    common = {"recurrence": recurrence}
    if dims.delta_net is not None:
        of_delta = {"dims": dims.delta_net, "norm": partial(RMSNorm, ops=fused), **common}
        mixer = ModuleSpec(module=PackedGatedDeltaNet, params=of_delta)
        specs |= dict.fromkeys(dims.delta_net.layers, mixer)
    if dims.mamba is not None:
        mixer = ModuleSpec(module=PackedMamba2, params={"dims": dims.mamba, **common})
        specs |= dict.fromkeys(dims.mamba.layers, mixer)
    return specs


def _local_layer(
    varlen: VarlenAttention,
    norm: ModuleSpec,
    *,
    num_experts: int | None,
    qk_norm: bool,
    gated: bool,
    router: type[PackedRouter],
) -> ModuleSpec:
    """Megatron's local layer with our norms and our attention."""
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=qk_norm,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    core = ModuleSpec(module=PackedCoreAttention, params={"varlen": varlen})
    head_norms = {"q_layernorm": norm, "k_layernorm": norm} if qk_norm else {}
    attention = with_parts(layer.self_attention, core_attention=core, **head_norms)
    if gated:
        attention = replace(attention, module=GatedSelfAttention)
    dense = num_experts is None
    made: ModuleSpec = with_parts(
        spec,
        input_layernorm=norm,
        pre_mlp_layernorm=norm,
        mlp=layer.mlp if dense else with_parts(layer.mlp, router=router),
        self_attention=attention,
    )
    return made


def padded_vocabulary(dims: LanguageDims, sizes: ParallelismSection) -> int:
    """Rows of the embedding, rounded up so that every tensor-parallel rank has as many."""
    return round_up(dims.vocabulary, sizes.tensor)
