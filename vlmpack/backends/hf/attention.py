"""Our varlen attention as an attention implementation of transformers.

Only the language model gets it. A vision tower has another function, with another name and other
arguments (`families/tower_attention.py`). Each refuses the other's arguments.

No mask function is registered on purpose. For an implementation without one, transformers builds no
mask, neither T x T nor by looking for sample boundaries in the positions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from vlmpack.attention import (
    AttentionChoice,
    BlockMasks,
    VarlenAttention,
    dense_attention,
    segment_attention,
)
from vlmpack.attention.eager import eager
from vlmpack.attention.prefix_attention import PrefixAttention
from vlmpack.backends.hf.context import HeadExchange
from vlmpack.errors import CapabilityError
from vlmpack.kernel_operators import is_plain
from vlmpack.packing import PackedSeqParams


def _own(choice: AttentionChoice) -> VarlenAttention:
    """What runs: the choice, or on the plain path the loop over segments."""
    return segment_attention if is_plain() else choice.function


@eager
def _attend(
    choice: AttentionChoice,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend inside segments (packed) or rows (padded). transformers calls it once per layer.

    Args:
        query: (B, Hq, S, D); B is 1 and S is T for a packed row.
        key: (B, Hkv, S, D).
        value: (B, Hkv, S, Dv); Dv differs from D in latent attention.
        attention_mask: always None here; anything else means that a caller built a mask that
            this function would ignore.
        options: scaling, dropout, sliding_window, and arguments of the model's forward. These are
            `packed_seq_params` for a THD row, with `prefix_row` if it shares prefixes and
            `head_exchange` if ranks share it, or `padded_rows=True`. `image_masks` is there if an
            image's tokens attend in both directions.

    Returns:
        (B, S, Hq, Dv) and no weights.
    """
    if attention_mask is not None:
        raise CapabilityError("vlmpack attention takes boundaries, not an attention mask")
    if options.get("tower_inputs") is not None:
        raise CapabilityError(
            f"{type(module).__name__} of the language model was called with tower_inputs, where "
            f"images end; its samples end elsewhere"
        )
    if options.get("dropout"):
        raise CapabilityError(
            "attention dropout is not supported: packed and unpacked runs would differ; "
            "set attention_dropout to 0 in the model's config.json"
        )
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise CapabilityError("attention softcap and sinks are not supported by vlmpack yet")
    scale: float | None = options.get("scaling")
    own, width = value.shape[-1], max(query.shape[-1], value.shape[-1])
    if own != query.shape[-1]:  # zeros change no score; kernels want one width
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        query, key, value = (
            nn.functional.pad(part, (0, width - part.shape[-1])) for part in (query, key, value)
        )
    window: int | None = options.get("sliding_window")
    params: PackedSeqParams | None = options.get("packed_seq_params")
    masks: BlockMasks | None = options.get("image_masks")
    if choice.image_blocks and masks is None:
        raise CapabilityError(
            f"{type(module).__name__} called vlmpack attention without image_masks; causal "
            f"attention would hide the rest of an image from its first tokens"
        )
    if params is not None:
        # Under autocast rotary leaves queries and keys in float32 while values are bfloat16;
        # varlen kernels, unlike scaled_dot_product_attention, are not on autocast's list.
        shares = params.prefix_tree is not None
        function = PrefixAttention(choice, options.get("prefix_row")) if shares else _own(choice)
        queries, keys, values = (
            part.squeeze(0).transpose(0, 1).to(value.dtype) for part in (query, key, value)
        )
        exchange: HeadExchange | None = options.get("head_exchange")
        if exchange is not None:
            plain = is_plain() or choice.name == "segments"
            function = exchange.around(function, None if plain else choice.name)
        output = function(queries, keys, values, params, scale=scale, window=window, masks=masks)
        return output[None, ..., :own], None
    if not options.get("padded_rows"):
        raise CapabilityError(
            f"{type(module).__name__} called vlmpack attention without boundaries: neither "
            f"packed_seq_params nor padded_rows reached it; attending over the whole row "
            f"would mix samples"
        )
    padded = _padded_rows(query, key, value, scale=scale, window=window, masks=masks)
    return padded[..., :own], None


def _padded_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None,
    masks: BlockMasks | None,
) -> Tensor:
    """Causal attention over right-padded rows, with image blocks; no real token sees padding."""
    if masks is None:  # one mask for all rows
        masks = BlockMasks((query.shape[2],), (), query.device)
    output = dense_attention(query, key, value, mask=masks.rows(window), causal=True, scale=scale)
    return output.transpose(1, 2)


def register_attention(choice: AttentionChoice) -> str:
    """Register an implementation with transformers, and return its name for
    `set_attn_implementation`.

    The name must not contain "flash", because transformers would then look for a kernel of that
    name on the hub.
    """
    from transformers import AttentionInterface

    kernel = choice.name.replace("flash_attn", "fa")
    traits = {"_image_blocks": choice.image_blocks, "_wide_heads": choice.wide_heads}
    name = f"vlmpack_{kernel}" + "".join(trait for trait, has in traits.items() if has)
    AttentionInterface.register(name, partial(_attend, choice))
    return name
