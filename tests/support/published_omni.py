"""What is published of Nemotron 3 Nano Omni: sizes and settings; no weights.

Read 2026-11-22 in public readers of its config.json (ollama's and vLLM's tests of their converters
and counters of image tokens, which agree where they overlap; none notes a revision), in the names
that transformers 5.23 maps, and in its model card (31B parameters, 23 Mamba-2, 23 mixtures and 6
attention layers). Its language model is Nemotron 3 Nano. What RadioConfig has as its defaults
(C-RADIOv4-H) is not repeated. Not found: the list of parameter names, and whether its vision_config
says more than this.
"""

from __future__ import annotations

from typing import Any

from support.published_hybrids import NEMOTRON_3_NANO

OF_ITS_OWN = "NemotronH_Nano_Omni_Reasoning_V3"
"""The `model_type` that it was published with, whose code lies beside it."""

NEMOTRON_3_NANO_OMNI: dict[str, Any] = {
    "architectures": ["NemotronH_Omni_Reasoning_V3"],
    "model_type": "nemotron_h_omni",
    "force_image_size": 512,
    "downsample_ratio": 0.5,
    "img_context_token_id": 18,
    "sound_context_token_id": 27,
    "vit_hidden_size": 1280,
    "projector_hidden_size": 20480,
    "vision_config": {"model_type": "radio", "patch_size": 16, "video_temporal_patch_size": 2},
    "sound_config": {
        "model_type": "parakeet_encoder",
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "intermediate_size": 4096,
        "conv_kernel_size": 9,
        "subsampling_conv_channels": 256,
        "subsampling_conv_kernel_size": 3,
        "subsampling_conv_stride": 2,
        "subsampling_factor": 8,
        "num_mel_bins": 128,
        "projection_hidden_size": 4096,
        "projection_bias": False,
    },
    "llm_config": NEMOTRON_3_NANO,
}
"""With the names of classes that transformers has; as published `sound_config` says `parakeet`."""

PROCESSOR: dict[str, Any] = {
    "image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor",
    "patch_size": 16,
    "downsample_ratio": 0.5,
    "min_num_patches": 1024,
    "max_num_patches": 13312,
    "norm_mean": [0.48145466, 0.4578275, 0.40821073],
    "norm_std": [0.26862954, 0.26130258, 0.27577711],
}
