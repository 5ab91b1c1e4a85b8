"""Gemma 4's language model alone, and what the whole model shares with it.

Per-layer inputs are looked up by ids, so a decoder that is called with embeddings must be handed
them; transformers would find the ids again by comparing each embedding with the whole table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from vlmpack.families import flops
from vlmpack.families.base import Family
from vlmpack.families.configs import final_logit_cap, whole_config
from vlmpack.families.text_lm import TextLM
from vlmpack.packing import CostModel

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """A decoder layer's sizes.

    Args:
        inner: channels of all query heads.
        key: channels of all key heads.
        projections: of keys and values that the layer has itself: 0 where it reuses an earlier
            layer's, 1 where its values are its keys, 2.
        mlp: columns of the MLP that every token passes through.
    """

    inner: int
    key: int
    projections: int
    mlp: int


def text_of(config: Config) -> Config:
    """The section of the language model, or the whole of its own config.json."""
    text: Config = config.get("text_config") or config
    return text


def layer_shapes(text: Config) -> list[LayerShape]:
    """Every decoder layer's.

    Args:
        text: of `whole_config`.

    Raises:
        ModelError: a size is missing.
    """
    heads, layers = flops.size(text, "num_attention_heads"), flops.size(text, "num_hidden_layers")
    others = {int(key): own for key, own in (text.get("per_layer_config") or {}).items()}
    first_shared = layers - (text.get("num_kv_shared_layers") or 0)
    shapes = []
    for layer, kind in enumerate(text["layer_types"]):
        own = {**text, **others.get(layer, {})}
        head = flops.size(own, "head_dim")
        shared = layer >= first_shared
        one = bool(text.get("attention_k_eq_v")) and kind == "full_attention"
        wide = 2 if shared and text.get("use_double_wide_mlp") else 1
        shapes.append(
            LayerShape(
                inner=heads * head,
                key=flops.size(own, "num_key_value_heads") * head,
                projections=0 if shared else 2 - one,
                mlp=wide * flops.size(text, "intermediate_size"),
            )
        )
    return shapes


def largest_head(config: Config) -> int:
    """Channels of the widest head of the decoder; `config` as in `Family.configured`."""
    text = text_of(whole_config(config))
    heads = flops.size(text, "num_attention_heads")
    return max(shape.inner for shape in layer_shapes(text)) // heads


def decoder_cost(config: Config, tower: flops.Tower | None = None) -> CostModel:
    """The decoder's, with or without a vision tower.

    Layers with a sliding window are priced as the others. A layer that reuses keys and values
    attends as any, and saves their projections.

    Args:
        config: of `whole_config`.
        tower: the vision tower.

    Raises:
        ModelError: a size is missing from it.
    """
    text = text_of(config)
    width, layers = flops.size(text, "hidden_size"), flops.size(text, "num_hidden_layers")
    shapes = layer_shapes(text)
    weights = sum(
        width * (2 * shape.inner + shape.projections * shape.key + 3 * shape.mlp)
        for shape in shapes
    )
    if text.get("enable_moe_block"):
        experts = flops.size(text, "top_k_experts") * 3 * flops.size(text, "moe_intermediate_size")
        weights += layers * width * (flops.size(text, "num_experts") + experts)
    extra = text.get("hidden_size_per_layer_input") or 0
    weights += layers * 3 * width * extra  # its projection from the embedding, a gate, and back
    cost = flops.cost_model({"text_config": {**text, "num_experts": 0}}, tower)
    return replace(
        cost,
        per_token=flops.STEP * 2.0 * weights,
        per_squared_length=flops.STEP * 2.0 * sum(shape.inner for shape in shapes),
    )


def per_layer_inputs(decoder: Any, input_ids: Tensor, media_positions: Tensor) -> dict[str, Any]:
    """What a decoder with per-layer inputs takes of ids; see `Family.decoder_arguments`.

    A placeholder has the padding token's, as in `Gemma4Model.forward`.
    """
    if not decoder.hidden_size_per_layer_input:
        return {}
    ids = input_ids.flatten().index_fill(0, media_positions, decoder.config.pad_token_id)
    return {"per_layer_inputs": decoder.get_per_layer_inputs(ids.view_as(input_ids))}


@dataclass(frozen=True, kw_only=True)
class Gemma4Text(TextLM):
    """The family; see `vlmpack.families.Family`."""

    def configured(self, config: Config) -> Family:
        """With the width of its heads."""
        return replace(self, largest_head=largest_head(config))

    def logit_cap(self, config: Config) -> float | None:
        """What the file says."""
        return final_logit_cap(config)

    def decoder_arguments(
        self, model: Any, input_ids: Tensor, media_positions: Tensor
    ) -> dict[str, Any]:
        """Per-layer inputs, where it has them."""
        decoder = model.get_submodule(self.modules.language)
        return per_layer_inputs(decoder, input_ids, media_positions)

    def cost_model(self, config: Config) -> CostModel:
        """The decoder's; published files leave sizes out."""
        return decoder_cost(whole_config(config))


FAMILY = Gemma4Text(name="gemma4_text", model_types=("gemma4_text",))
