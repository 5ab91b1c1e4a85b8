"""Megatron's configuration of a Qwen2-shaped language model, from the model folder's config.

What packing and per-token losses need is set here and nowhere else: `variable_seq_lengths`,
`calculate_per_token_loss`, no dropout, no fused residual ops that assume one sequence a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from vlmpack.alignment import round_up
from vlmpack.attention import RopeLayout, VarlenAttention
from vlmpack.backends.mcore.attention import PackedCoreAttention
from vlmpack.backends.mcore.groups import ParallelSizes
from vlmpack.backends.mcore.norm import RMSNorm
from vlmpack.errors import CapabilityError


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageDims:
    """The language model's sizes, as transformers' config gives them.

    Args:
        layers: decoder layers.
        hidden: model width.
        heads: query heads.
        groups: key-value heads.
        head_dim: width of a head.
        intermediate: width of the MLP.
        vocabulary: rows of the embedding.
        norm_eps: of RMSNorm.
        tied: whether embedding and output layer share their weight.
        rope_theta: base of the rotary frequencies.
        rope: which position axis drives which frequency.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    intermediate: int
    vocabulary: int
    norm_eps: float
    tied: bool
    rope_theta: float
    rope: RopeLayout

    @classmethod
    def from_transformers(cls, config: Any) -> LanguageDims:
        """Read a transformers VLM config.

        Raises:
            CapabilityError: a feature that the Megatron engine does not build.
        """
        text = config.get_text_config()
        rope = text.rope_parameters
        if rope.get("rope_type", "default") != "default":
            raise CapabilityError(
                f"rope_type {rope['rope_type']!r} is not in the mcore engine, which knows "
                f"'default'; use model.backend: hf"
            )
        if text.hidden_act != "silu":
            raise CapabilityError(f"hidden_act {text.hidden_act!r}, the mcore engine knows 'silu'")
        if any(kind != "full_attention" for kind in text.layer_types):
            raise CapabilityError(
                "layers with sliding-window attention are not in the mcore engine; use "
                "model.backend: hf"
            )
        section = rope.get("mrope_section")
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            heads=text.num_attention_heads,
            groups=text.num_key_value_heads,
            head_dim=getattr(text, "head_dim", None)
            or text.hidden_size // text.num_attention_heads,
            intermediate=text.intermediate_size,
            vocabulary=text.vocab_size,
            norm_eps=text.rms_norm_eps,
            tied=config.tie_word_embeddings,
            rope_theta=rope["rope_theta"],
            rope=RopeLayout(mrope_section=tuple(section) if section else None),
        )

    def inverse_frequencies(self, device: torch.device) -> torch.Tensor:
        """(D / 2,) float32: theta^(-2i / D) (RoFormer, 2104.09864)."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
        return 1.0 / (self.rope_theta ** (exponents / self.head_dim))

    def check(self, sizes: ParallelSizes) -> None:
        """Raise CapabilityError for sizes that do not divide, with both numbers."""
        for what, size, knob, by in (
            ("query heads", self.heads, "tensor", sizes.tensor),
            ("key-value heads", self.groups, "tensor", sizes.tensor),
            ("MLP columns", self.intermediate, "tensor", sizes.tensor),
            ("layers", self.layers, "pipeline", sizes.pipeline),
        ):
            if size % by:
                raise CapabilityError(
                    f"parallelism.{knob} is {by}, which does not divide the model's {size} {what}"
                )


def transformer_config(
    dims: LanguageDims,
    sizes: ParallelSizes,
    *,
    dtype: torch.dtype,
    activation_checkpointing: bool,
) -> TransformerConfig:
    """Megatron's config; `dtype` is that of weights and activations."""
    recompute: dict[str, Any] = {}
    if activation_checkpointing:
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        num_layers=dims.layers,
        hidden_size=dims.hidden,
        num_attention_heads=dims.heads,
        num_query_groups=dims.groups,
        kv_channels=dims.head_dim,
        ffn_hidden_size=dims.intermediate,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=dims.norm_eps,
        add_bias_linear=False,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        context_parallel_size=sizes.context,
        sequence_parallel=sizes.sequence,
        # Packed rows differ in width from micro-batch to micro-batch, so stages send shapes first.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # Megatron asks for it even without experts
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        # Every weight is read from the model folder.
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **recompute,
    )


def decoder_spec(
    config: TransformerConfig, varlen: VarlenAttention | None
) -> TransformerBlockSubmodules:
    """This stage's layers.

    Args:
        config: Megatron's configuration.
        varlen: attention over whole rows, in Megatron's local layers; None for Transformer
            Engine's layers and attention.
    """
    layer, norm = _local_layer(varlen) if varlen is not None else _transformer_engine_layer()
    count = get_num_layers_to_build(
        config, pp_rank=parallel_state.get_pipeline_model_parallel_rank()
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def _transformer_engine_layer() -> tuple[ModuleSpec, Any]:
    from vlmpack.backends.mcore.te import transformer_engine_layer  # needs CUDA

    return transformer_engine_layer()


def _local_layer(varlen: VarlenAttention) -> tuple[ModuleSpec, Any]:
    """Megatron's local layer with our norm and our attention, and the final norm."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer = spec.submodules
    attention = layer.self_attention
    core = ModuleSpec(module=PackedCoreAttention, params={"varlen": varlen})
    return (
        replace(
            spec,
            submodules=replace(
                layer,
                input_layernorm=RMSNorm,
                pre_mlp_layernorm=RMSNorm,
                self_attention=replace(
                    attention, submodules=replace(attention.submodules, core_attention=core)
                ),
            ),
        ),
        RMSNorm,
    )


def padded_vocabulary(dims: LanguageDims, sizes: ParallelSizes) -> int:
    """Rows of the embedding, rounded up so that every tensor-parallel rank has as many."""
    return round_up(dims.vocabulary, sizes.tensor)
