"""Megatron's configuration of a language model, from the model folder's config.

What packing and per-token losses need is set here and nowhere else: `variable_seq_lengths`,
`calculate_per_token_loss`, no dropout, no fused residual ops that assume one sequence a row.
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
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from vlmpack.alignment import round_up
from vlmpack.attention import VarlenAttention
from vlmpack.backends.fused import FusedOps, NormForm
from vlmpack.backends.mcore.attention import PackedCoreAttention
from vlmpack.backends.mcore.delta_net import DeltaNetSubmodules, PackedGatedDeltaNet
from vlmpack.backends.mcore.gated_attention import GatedSelfAttention
from vlmpack.backends.mcore.mamba import mamba_spec
from vlmpack.backends.mcore.norm import PLAIN, RMSNorm
from vlmpack.backends.mcore.one_part import one_part
from vlmpack.backends.mcore.router import BiasedRouter, PackedRouter
from vlmpack.backends.mcore.versions import (
    hide_advice_to_us,
    routers_need_no_transformer_engine,
    with_parts,
)
from vlmpack.backends.mcore.weights.dims import LanguageDims
from vlmpack.backends.mcore.weights.layer_dims import DeltaNetDims, ExpertDims
from vlmpack.errors import CapabilityError
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.recurrence import RecurrenceChoice


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
        dims: the language model's sizes.
        model: what the recipe says of it.
        sizes: how it is spread.
        dtype: of weights and activations.
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
        add_qkv_bias=dims.qkv_bias,
        qk_layernorm=dims.qk_norm,
        attention_output_gate=dims.output_gate,
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
        batch_p2p_sync=False,  # for old versions of torch; the host would wait behind each message
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
    shared: dict[str, Any] = {}
    if experts.shared:
        shared = {
            "moe_shared_expert_intermediate_size": experts.shared,
            "moe_shared_expert_gate": experts.shared_gate,
        }
    if experts.score == "sigmoid":
        if aux_loss:
            raise CapabilityError(
                f"model.router_aux_loss_coef: {aux_loss}, but experts that are chosen by a sigmoid "
                f"and a bias have no load-balancing loss in transformers; leave it out"
            )
        shared |= {
            "moe_router_score_function": experts.score,
            "moe_router_topk_scaling_factor": experts.scaling,
            "moe_router_dtype": "fp32",
        }
    return shared | {
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


def decoder_spec(
    config: TransformerConfig,
    dims: LanguageDims,
    varlen: VarlenAttention | None,
    fused: FusedOps | None = None,
    recurrence: RecurrenceChoice | None = None,
) -> TransformerBlockSubmodules:
    """This stage's layers.

    Args:
        config: Megatron's configuration.
        dims: the language model's sizes.
        varlen: attention over whole rows, in Megatron's local layers; None for Transformer
            Engine's layers and attention.
        fused: what runs norms; None for torch's operators. Transformer Engine has its own.
        recurrence: what runs layers that carry state.

    Raises:
        CapabilityError: such layers, and Transformer Engine's.
    """
    build: Callable[..., ModuleSpec]
    norm: Any
    if varlen is not None:
        norm = ModuleSpec(module=RMSNorm, params={"ops": fused, "form": norm_form(dims)})
        biased = dims.experts is not None and dims.experts.score == "sigmoid"
        router = BiasedRouter if biased else PackedRouter
        build = partial(_local_layer, varlen, norm, gated=dims.output_gate, router=router)
    elif dims.output_gate or dims.state_kinds or norm_form(dims) != PLAIN:
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
        build(num_experts=experts.get(number), qk_norm=dims.qk_norm)
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
    """How the model's norms are computed, but for that behind a delta rule."""
    return NormForm(dims.norm_offset, rounds_first=dims.norm_rounds_first)


def _stateful(
    dims: LanguageDims, recurrence: RecurrenceChoice | None, fused: FusedOps | None
) -> dict[int, ModuleSpec]:
    """What layers that carry state have instead of attention, by number."""
    found: dict[int, ModuleSpec] = {}
    if recurrence is None:
        return found
    if dims.delta_net is not None:
        found |= dict.fromkeys(dims.delta_net.layers, _delta_net(dims.delta_net, recurrence, fused))
    if dims.mamba is not None:
        found |= dict.fromkeys(dims.mamba.layers, mamba_spec(dims.mamba, recurrence))
    return found


def _delta_net(
    dims: DeltaNetDims, recurrence: RecurrenceChoice, fused: FusedOps | None
) -> ModuleSpec:
    """A layer's GatedDeltaNet."""
    return ModuleSpec(
        module=PackedGatedDeltaNet,
        params={"dims": dims, "recurrence": recurrence},
        submodules=DeltaNetSubmodules(
            in_proj=ColumnParallelLinear,
            out_norm=ModuleSpec(module=RMSNorm, params={"ops": fused}),
            out_proj=RowParallelLinear,
        ),
    )


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
