"""A tiny Gemma 4 without a tower, whose image processor transformers has on torchvision alone.

Tokens are of 18 x 18 pixels, at most 70 an image.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.played_torchvision import processor_on_torchvision
from support.tiny_family import TEXT, id_of
from support.tiny_gemma4 import DENSE, GEMMA4_DENSE, IMAGES, PATCH, POOL, STOCK, TEXT_4, TOKENS

VISION = {
    "patch_size": PATCH,
    "pooling_kernel_size": POOL,
    "mm_embed_dim": 48,
    "mm_posemb_size": 80,
    "output_proj_dims": 48,
    "initializer_range": 0.1,
}


def config(**others: Any) -> Any:
    """The transformers config; two layers reuse the keys and values of earlier ones."""
    from transformers import Gemma4UnifiedConfig

    shape = {key: value for key, value in DENSE.items() if key != "hidden_size_per_layer_input"}
    layers = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
    vocabulary = TEXT["vocab_size"] + len(TOKENS)
    text = {**TEXT_4, **shape, **layers, "num_kv_shared_layers": 2, "vocab_size": vocabulary}
    settings = {
        "text_config": text,
        "vision_config": VISION,
        "boi_token_id": id_of(TOKENS, TOKENS[0]),
        "eoi_token_id": id_of(TOKENS, TOKENS[1]),
        "image_token_id": id_of(TOKENS, TOKENS[2]),
        "tie_word_embeddings": True,
    }
    return Gemma4UnifiedConfig(**{**settings, **others})


def _prepared(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """With the masks that the class makes for `generate`, in place of those of its own forward."""
    masks = model.create_masks_for_generate(
        model.config,
        model.get_input_embeddings()(arguments["input_ids"]),
        arguments["attention_mask"],
        None,
        None,
        mm_token_type_ids=arguments["mm_token_type_ids"],
    )
    return {**arguments, "attention_mask": masks}


GEMMA4_UNIFIED = replace(
    GEMMA4_DENSE,
    config=config,
    stock=replace(STOCK, processor=processor_on_torchvision, prepared=_prepared),
    images={
        **IMAGES,
        "image_processor_type": "Gemma4UnifiedImageProcessor",
        "processor_class": "Gemma4UnifiedProcessor",
    },
)
