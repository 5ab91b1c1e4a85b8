"""What a class wants beyond small sizes, where its defaults do not fit together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFacts:
    """What one model_type wants.

    Args:
        config: put into its config.json.
        images: put into its preprocessor_config.json.
        processor: put into its processor_config.json.
        tokens: attributes of its tokenizer, beside those that its processor's sources ask for.
        around: what the template writes before and after an image.
        words: further special tokens that the processor writes.
        processor_class: where transformers registers none under its name.
        image_processor_class: likewise.
        placeholder: the token that features replace, where it is not the one that is repeated.
        text_alone: whether its class takes no images although transformers registers it with some.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    images: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)
    around: tuple[str, str] = ("", "")
    words: tuple[str, ...] = ()
    processor_class: str | None = None
    image_processor_class: str | None = None
    placeholder: str | None = None
    text_alone: bool = False


_TILED = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
"""Settings of processors that count a tower's patches and its class token."""

_AROUND = ("<|vision_start|>", "<|vision_end|>")

_THINKER = {
    "vision_start_token_id": 0,
    "vision_end_token_id": 0,
    "audio_start_token_id": 0,
    "audio_end_token_id": 0,
    "image_token_id": 0,
    "video_token_id": 0,
    "audio_token_id": 0,
}
"""Ids that a published config.json has beyond the class's defaults; they get numbers."""

CLASSES: Mapping[str, ClassFacts] = {
    "aria": ClassFacts(
        config={
            "vision_config": {"image_size": 980, "patch_size": 140},
            "projector_patch_to_query_dict": {"49": 256},
        },
    ),
    "aya_vision": ClassFacts(
        words=("TILE_GLOBAL", *(f"TILE_{n}" for n in range(1, 13))),
        processor={"patch_size": 28, "img_size": 56},
    ),
    "bamba": ClassFacts(config={"attn_layer_indices": [1]}),
    "cohere_compass": ClassFacts(
        config={
            "text_config": {
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "default",
                        "rope_theta": 10000.0,
                        "mrope_section": [4, 4, 4],
                    }
                }
            }
        }
    ),
    "cosmos3_edge": ClassFacts(config={"projector_hidden_size": 48}),
    "cosmos3_omni": ClassFacts(processor_class="Qwen3VLProcessor"),
    "deepseek_ocr2": ClassFacts(
        config={
            "text_config": {
                "mlp_layer_types": ["dense", "sparse"],
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
            },
            "vision_config": {
                "sam_config": {
                    "downsample_channels": [32, 64],
                    "image_size": 768,
                    "patch_size": 48,
                },
                "encoder_config": {"hidden_size": 64},
            },
        },
        images={"size": {"height": 768, "width": 768}, "tile_size": 768},
    ),
    "deepseek_v2": ClassFacts(config={"num_experts_per_tok": 2}),
    "deepseek_vl": ClassFacts(processor={"num_image_tokens": 16}),
    "deepseek_vl_hybrid": ClassFacts(
        processor={"num_image_tokens": 16},
        images={"high_res_size": {"height": 128, "width": 128}},
        config={"high_res_vision_config": {"image_size": 128, "patch_size": 16, "window_size": 4}},
    ),
    "ernie4_5_vl_moe": ClassFacts(
        config={
            "text_config": {
                "moe_intermediate_size": [32, 16],
                "rope_parameters": {"mrope_section": [2, 2, 4]},
            }
        }
    ),
    "glm4v_moe": ClassFacts(image_processor_class="Glm4vImageProcessorPil"),
    "glm5_next": ClassFacts(config={"text_config": {"num_key_value_heads": 4}}),
    "glm_ocr": ClassFacts(
        processor_class="Glm46VProcessor", image_processor_class="Glm46VImageProcessorPil"
    ),
    "glmga": ClassFacts(processor_class="Glm46VProcessor"),
    "granite4_vision": ClassFacts(
        processor={**_TILED, "downsample_rate": "2/4"},
        config={
            "downsample_rate": "2/4",
            "deepstack_layer_map": [[-2, 0]],
            "spatial_target_layers": [0, 1, 1, 1],
            "vision_config": {"hidden_size": 64},
            "qformer_config": {
                "hidden_size": 64,
                "encoder_hidden_size": 64,
                "attention_probs_dropout_prob": 0.0,
                "hidden_dropout_prob": 0.0,
            },
            "projector_dropout": 0.0,
        },
    ),
    "granite_docling": ClassFacts(
        images={"size": {"height": 64, "width": 64}},
        config={"vision_config": {"image_size": 64, "patch_size": 16, "scale_factor": 2}},
        processor={"image_seq_len": 4},
    ),
    "idefics2": ClassFacts(
        images={"size": {"shortest_edge": 42, "longest_edge": 70}},
        config={
            "vision_config": {"image_size": 70},
            "perceiver_config": {"resampler_n_latents": 64},
        },
    ),
    "got_ocr2": ClassFacts(  # 256 features of an image, which take 4,096 patches
        images={"size": {"height": 256, "width": 256}},
        config={
            "vision_config": {
                "image_size": 256,
                "patch_size": 4,
                "window_size": 8,
                "global_attn_indexes": [],
                "output_channels": 32,
            }
        },
    ),
    "granitemoehybrid": ClassFacts(config={"layer_types": ["linear_attention", "full_attention"]}),
    "hunyuan_v1_dense": ClassFacts(
        config={
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "alpha": 1000.0},
            "head_dim": 16,
        }
    ),
    "hunyuan_vl": ClassFacts(
        images={"size": {"shortest_edge": 64**2, "longest_edge": 256**2}},
        config={
            "text_config": {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "alpha": 1000.0,
                    "mrope_section": [2, 2, 2, 2],
                },
                "head_dim": 16,
            }
        },
    ),
    "janus": ClassFacts(
        config={
            "vq_config": {
                "embed_dim": 8,
                "num_embeddings": 32,
                "base_channels": 32,
                "latent_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "projection_dim": 32,
                "image_token_embed_dim": 32,
                "num_patches": 4,
            },
            "vision_config": {"projection_dim": 64},
        },
        processor={"num_image_tokens": 16},
    ),
    "kimi_linear": ClassFacts(config={"num_experts_per_token": 2, "num_shared_experts": 1}),
    "lfm2": ClassFacts(config={"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": ClassFacts(config={"layer_types": ["conv", "full_attention"]}),
    "lighton_ocr": ClassFacts(
        images={"patch_size": {"height": 28, "width": 28}},
        config={"vision_config": {"image_size": 1540, "patch_size": 14}},
    ),
    "llava_next": ClassFacts(processor=_TILED),
    "llava_next_video": ClassFacts(processor=_TILED),
    "mamba2": ClassFacts(config={"head_dim": 32, "n_groups": 2}),
    "ministral": ClassFacts(
        config={
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "head_dim": 16,
        }
    ),
    "mistral4": ClassFacts(text_alone=True, config={"head_dim": 16}),
    "nemotron": ClassFacts(config={"num_key_value_heads": 2}),
    "ovis2": ClassFacts(processor={"image_seq_length": 16}),
    "paligemma": ClassFacts(images={"image_seq_length": 16}),
    "phimoe": ClassFacts(config={"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}),
    "qianfan_ocr": ClassFacts(processor={"image_seq_length": 4}),
    "qwen2_5_omni_thinker": ClassFacts(
        processor_class="Qwen2_5OmniProcessor",
        tokens=dict(zip(("vision_start_token", "vision_end_token"), _AROUND, strict=True)),
        around=_AROUND,
        image_processor_class="Qwen2VLImageProcessorPil",
        config=_THINKER,
    ),
    "qwen3_omni_moe_thinker": ClassFacts(
        processor_class="Qwen3OmniMoeProcessor",
        tokens=dict(zip(("vision_start_token", "vision_end_token"), _AROUND, strict=True)),
        around=_AROUND,
        image_processor_class="Qwen2VLImageProcessorPil",
        config=_THINKER,
    ),
    "seed_oss": ClassFacts(config={"attention_dropout": 0.0, "residual_dropout": 0.0}),
    "video_llava": ClassFacts(processor=_TILED),
    "zamba2": ClassFacts(
        config={
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            "num_hidden_layers": 3,
            "hybrid_layer_ids": [1, 2],
        }
    ),
    "vipllava": ClassFacts(processor=_TILED, config={"vision_feature_layers": [-2, -1]}),
}

_CODES = "its images become discrete codes (a VQ-VAE), through which no gradient reaches a tower"

_INDEXER = "its sparse attention picks keys from the whole row, the samples beside one's own too"
_QUESTION = "what its Q-Former makes of an image depends on the words that the user wrote beside it"
_RECURRENT = (
    "its recurrent layers carry state over the ends of packed samples, and transformers does not "
    "tell them where samples end"
)
_KIMI_DELTA = "its Kimi Delta Attention carries state, and has no form here that resets at segments"
_NUMBERED = (
    "its processor numbers the images of a sample in the text, so what stands for an image does "
    "not follow from its size"
)
_TWICE = (
    "its high_res_vision_proj runs twice in a forward pass, on all images each time, and verify "
    "cannot tell whose features are whose"
)
_TIMM = "its tower is one of the package timm, which is no dependency"

LANGUAGE_MODELS = (
    *("arcee", "bailing_hybrid", "bamba", "cohere", "cohere2", "deepseek_v2", "deepseek_v32"),
    *("ernie4_5", "ernie4_5_moe", "exaone4", "falcon_h1", "falcon_mamba", "gemma", "gemma2"),
    *("glm", "glm4", "glm_moe_dsa", "gpt_oss", "granite", "granitemoe", "granitemoehybrid"),
    *("granitemoeshared", "hunyuan_v1_dense", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3"),
    *("llama4_text", "mamba", "mamba2", "mimo_v2_flash", "minimax", "minimax_m2", "ministral"),
    *("ministral3", "mistral", "mixtral", "nemotron", "olmo2", "olmo3", "olmo_hybrid", "olmoe"),
    *("phi3", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "recurrent_gemma", "rwkv"),
    *("seed_oss", "smollm3", "stablelm", "starcoder2", "xlstm", "zamba", "zamba2"),
)
"""Language models alone that are swept: those that people finetune, and all that carry state."""

REASONS: Mapping[str, str] = {
    "chameleon": _CODES,
    "dots3_note": _INDEXER,
    "emu3": _CODES,
    "bailing_hybrid": _KIMI_DELTA,
    "zamba": "the scan of the first Mamba (selective_scan) cannot be reset here at segments",
    "deepseek_v32": _INDEXER,
    "deepseek_vl_hybrid": _TWICE,
    "fast_vlm": _TIMM,
    "fuyu": "transformers' image processor of it on PIL fails on its own images (patchify_image "
    "calls transpose with five axes)",
    "gemma3n": _TIMM,
    "glm5_next": _INDEXER,
    "glm_moe_dsa": _INDEXER,
    "instructblip": _QUESTION,
    "instructblipvideo": _QUESTION,
    "minicpmv4_6": _NUMBERED,
    "minicpmv4_7": _NUMBERED,
    **dict.fromkeys(("minimax", "recurrent_gemma", "rwkv", "xlstm"), _RECURRENT),
    "mistral_large4": _INDEXER,
    "paligemma": "its prompt attends in both directions, the answer does not",
    "perception_lm": _TIMM,
    "qwen4_exp": _INDEXER,
    "shieldgemma2": "it is a classifier: its class answers with two probabilities, not with text",
}
"""Classes that are not tried, and the fact that is missing."""
