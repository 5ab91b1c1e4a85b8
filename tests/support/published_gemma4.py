"""What is published of Gemma 4: sizes and settings, no weights, no templates.

The values of 26B-A4B are those of google/gemma-4-26B-A4B-it at revision 4d7ae4984b7d, as a public
importer of that checkpoint checks them one by one, its processor and the count of the tower's
tensors included. Those of E2B, E4B and 31B were found alike in three or more independent public
programs that run these checkpoints; none of them notes a revision. Not found, and left to the
classes' defaults: the audio tower's sizes but for hidden_size, layers, heads and output_proj_dims.
The lists of parameter names: `published_names.py`.
"""

from __future__ import annotations

from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"

_TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        SLIDING: {"rope_theta": 1e4, "rope_type": "default"},
    },
}
_E_SERIES: dict[str, Any] = {
    **_TEXT,
    "num_attention_heads": 8,
    "hidden_size_per_layer_input": 256,
    "sliding_window": 512,
    "max_position_embeddings": 131072,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "use_bidirectional_attention": None,
}
_LARGE: dict[str, Any] = {
    **_TEXT,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "attention_k_eq_v": True,
    "use_double_wide_mlp": False,
    "use_bidirectional_attention": "vision",
}
_VISION: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10240,
    "default_output_length": 280,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
}
_SMALL_TOWER = {
    **_VISION,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "standardize": False,
    "use_clipped_linears": True,
}
_LARGE_TOWER = {
    **_VISION,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "standardize": True,
    "use_clipped_linears": False,
}
_AUDIO = {
    "model_type": "gemma4_audio",
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "output_proj_dims": 1536,
}
_TOKENS = {
    "image_token_id": 258880,
    "audio_token_id": 258881,
    "video_token_id": 258884,
    "boi_token_id": 255999,
    "eoi_token_id": 258882,
}


def _config(text: dict[str, Any], vision: dict[str, Any], audio: dict[str, Any] | None) -> Any:
    return {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
        "audio_config": audio,
        "vision_soft_tokens_per_image": 280,
        "tie_word_embeddings": True,
        **_TOKENS,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "E2B": _config(
        {
            **_E_SERIES,
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 35,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "layer_types": [*[SLIDING] * 4, FULL] * 7,
        },
        _SMALL_TOWER,
        _AUDIO,
    ),
    "E4B": _config(
        {
            **_E_SERIES,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 42,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 18,
            "use_double_wide_mlp": False,
            "layer_types": [*[SLIDING] * 5, FULL] * 7,
        },
        _SMALL_TOWER,
        _AUDIO,
    ),
    "31B": _config(
        {
            **_LARGE,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "enable_moe_block": False,
            "layer_types": [*[SLIDING] * 5, FULL] * 10,
        },
        _LARGE_TOWER,
        None,
    ),
    "26B-A4B": _config(
        {
            **_LARGE,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
            "layer_types": [*[SLIDING] * 5, FULL] * 5,
        },
        _LARGE_TOWER,
        None,
    ),
}
"""config.json by the name of the checkpoint."""

TOWER_TENSORS = 355
"""In the tower of 26B-A4B."""

PROCESSOR: dict[str, Any] = {
    "processor_class": "Gemma4Processor",
    "image_seq_length": 280,
    "image_processor": {
        "image_processor_type": "Gemma4ImageProcessor",
        "do_convert_rgb": True,
        "do_normalize": False,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.0, 0.0, 0.0],
        "image_std": [1.0, 1.0, 1.0],
        "image_seq_length": 280,
        "max_soft_tokens": 280,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"height": 224, "width": 224},
    },
}
"""processor_config.json; there is no preprocessor_config.json."""

IMAGE_TOKENS = {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"}
"""Of tokenizer_config.json."""
