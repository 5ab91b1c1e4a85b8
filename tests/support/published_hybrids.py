"""What is published of Qwen3.5 and Nemotron 3: sizes, settings, names of parameters; no weights.

Qwen3.6-27B (config.json, and every parameter with its shape): a public report on that folder, which
prints both and notes no revision. Qwen3.8-27B at 1d4bf0f2ff6012fd82039f2fa52739d0dd7c60c0 has the
same config.json but for `transformers_version`, and the same names and bytes in its index
(github.com/BigBIueWhale/qwen_38_agent_setup, with the digests of the published files). The
processor's settings are those of that folder and of Qwen3.5-2B-Base.

Qwen3.6-35B-A3B: config.json as a public program pins it; names, shapes and types of its 1,045
tensors from a public census of its headers of 2026-09-16 (github.com/goodfire-ai/causalab,
tests/golden/parallel_headers_a3b.json), the same number and bytes in four other public programs at
995ad96eacd98c81ed38be0c5b274b04031597b0.

Qwen3.5-0.8B: sizes at revision 2fc06364715b, as a public test of an importer pins them; its tower
as three public tests have it; an index of 488 names and 1,746,882,752 bytes (of its base model).

Qwen3.8-2.4T-A95B, of text alone: a flat config.json of model_type qwen3_5_moe_text, whose sizes two
public programs have; the kinds of its 1,609 names, of an index read on 2026-09-03; 4.89 TB in
bfloat16. Not found: the width of its shared expert, for which that of the others is taken (the
bytes and the 95B of its name then agree), its vocabulary and its rope.

Nemotron-3-Nano-30B-A3B-BF16 at cbd3fa9f933d55ef16a84236559f4ee2a0526848: four public readers of its
config.json agree; its index has 6,243 names and says 31,577,937,344 parameters, 69 tensors are in
float32. Nemotron-3.5-Lightning-30B-A3B-BF16 at a9904d24bcc1d289a1950fa9d2b978c47cf903b9: the same
decoder, and 270 tensors of multi-token prediction, whose names and shapes a public test pins
(mobius, read from the headers).
"""

from __future__ import annotations

from typing import Any

QWEN_LAYERS = (["linear_attention"] * 3 + ["full_attention"]) * 16

QWEN3_6_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "language_model_only": False,
    "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": 248044,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 17408,
        "layer_types": QWEN_LAYERS,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "video_token_id": 248057,
    "vision_config": {
        "deepstack_visual_indexes": [],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4304,
        "model_type": "qwen3_5",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 5120,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}

_MLP = {
    "mlp.down_proj.weight": [5120, 17408],
    "mlp.gate_proj.weight": [17408, 5120],
    "mlp.up_proj.weight": [17408, 5120],
    "input_layernorm.weight": [5120],
    "post_attention_layernorm.weight": [5120],
}
_ATTENTION = {
    "self_attn.k_norm.weight": [256],
    "self_attn.k_proj.weight": [1024, 5120],
    "self_attn.o_proj.weight": [5120, 6144],
    "self_attn.q_norm.weight": [256],
    "self_attn.q_proj.weight": [12288, 5120],
    "self_attn.v_proj.weight": [1024, 5120],
}
_LINEAR = {
    "linear_attn.A_log": [48],
    "linear_attn.conv1d.weight": [10240, 1, 4],
    "linear_attn.dt_bias": [48],
    "linear_attn.in_proj_a.weight": [48, 5120],
    "linear_attn.in_proj_b.weight": [48, 5120],
    "linear_attn.in_proj_qkv.weight": [10240, 5120],
    "linear_attn.in_proj_z.weight": [6144, 5120],
    "linear_attn.norm.weight": [128],
    "linear_attn.out_proj.weight": [5120, 6144],
}
_BLOCK = {
    "attn.proj.bias": [1152],
    "attn.proj.weight": [1152, 1152],
    "attn.qkv.bias": [3456],
    "attn.qkv.weight": [3456, 1152],
    "mlp.linear_fc1.bias": [4304],
    "mlp.linear_fc1.weight": [4304, 1152],
    "mlp.linear_fc2.bias": [1152],
    "mlp.linear_fc2.weight": [1152, 4304],
    "norm1.bias": [1152],
    "norm1.weight": [1152],
    "norm2.bias": [1152],
    "norm2.weight": [1152],
}

QWEN3_6_27B_PARAMETERS: dict[str, list[int]] = {
    "lm_head.weight": [248320, 5120],
    "model.language_model.embed_tokens.weight": [248320, 5120],
    "model.language_model.norm.weight": [5120],
    **{
        f"model.language_model.layers.{n}.{name}": shape
        for n, kind in enumerate(QWEN_LAYERS)
        for name, shape in {
            **_MLP,
            **(_LINEAR if kind == "linear_attention" else _ATTENTION),
        }.items()
    },
    **{
        f"model.visual.blocks.{n}.{name}": shape
        for n in range(27)
        for name, shape in _BLOCK.items()
    },
    "model.visual.merger.linear_fc1.bias": [4608],
    "model.visual.merger.linear_fc1.weight": [4608, 4608],
    "model.visual.merger.linear_fc2.bias": [5120],
    "model.visual.merger.linear_fc2.weight": [5120, 4608],
    "model.visual.merger.norm.bias": [1152],
    "model.visual.merger.norm.weight": [1152],
    "model.visual.patch_embed.proj.bias": [1152],
    "model.visual.patch_embed.proj.weight": [1152, 3, 2, 16, 16],
    "model.visual.pos_embed.weight": [2304, 1152],
    "mtp.fc.weight": [5120, 10240],
    "mtp.norm.weight": [5120],
    "mtp.pre_fc_norm_embedding.weight": [5120],
    "mtp.pre_fc_norm_hidden.weight": [5120],
    **{f"mtp.layers.0.{name}": shape for name, shape in {**_MLP, **_ATTENTION}.items()},
}

QWEN3_5_PROCESSOR: dict[str, Any] = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}

QWEN3_5_0_8B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    **{k: QWEN3_6_27B[k] for k in QWEN3_6_27B if k.endswith("_token_id")},
    "text_config": {
        **QWEN3_6_27B["text_config"],
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "layer_types": QWEN_LAYERS[:24],
        "linear_num_value_heads": 16,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "vision_config": {
        **QWEN3_6_27B["vision_config"],
        "depth": 12,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_heads": 12,
        "out_hidden_size": 1024,
    },
}

NEMOTRON_3_NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "vocab_size": 131072,
    "tie_word_embeddings": False,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": False,
    "intermediate_size": 1856,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "chunk_size": 128,
    "expand": 2,
    "use_conv_bias": True,
    "use_bias": False,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}

NEMOTRON_3_5_LIGHTNING: dict[str, Any] = {
    **{key: value for key, value in NEMOTRON_3_NANO.items() if key != "hybrid_override_pattern"},
    "layers_block_type": [
        {"M": "mamba", "*": "attention", "E": "moe"}[kind]
        for kind in NEMOTRON_3_NANO["hybrid_override_pattern"]
    ],
    "num_nextn_predict_layers": 1,
    "mtp_layers_block_type": ["attention", "moe"],
}
"""Its list of kinds has 23, 6 and 23 of the three; the order is taken to be Nano's."""

QWEN3_6_35B: dict[str, Any] = {
    **{key: value for key, value in QWEN3_6_27B.items() if key != "language_model_only"},
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        **{
            key: value
            for key, value in QWEN3_6_27B["text_config"].items()
            if key not in ("intermediate_size", "output_gate_type")
        },
        "hidden_size": 2048,
        "layer_types": QWEN_LAYERS[:40],
        "linear_num_value_heads": 32,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
    },
    "vision_config": {
        **QWEN3_6_27B["vision_config"],
        "model_type": "qwen3_5_moe",
        "out_hidden_size": 2048,
    },
}

QWEN3_8_2_4T: dict[str, Any] = {
    **QWEN3_6_35B["text_config"],
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "hidden_size": 8192,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 23,
    "linear_num_value_heads": 128,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 92,
    "num_key_value_heads": 4,
    "shared_expert_intermediate_size": 2048,
    "tie_word_embeddings": False,
}
