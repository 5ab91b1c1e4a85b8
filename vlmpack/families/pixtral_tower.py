"""Pixtral's tower on the images of a whole batch in one call, without a mask.

The tower lays the patches of all images in one row. transformers keeps the images apart with a mask
of P x P patches, filled in for every call (5 GB in bfloat16 for 50,000 patches), and pads images to
the largest before that. Here patches come as rows and attention is told where images end: memory
grows with P, and nothing is computed between images.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from vlmpack.attention import VarlenAttention, choose_attention
from vlmpack.errors import CapabilityError
from vlmpack.packing import Media, PackedSeqParams

ATTENTION = "vlmpack_images"
"""The name under which transformers knows `images_attention`."""


def images_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    image_params: PackedSeqParams | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention inside each image of a row of patches, in both directions.

    Args:
        module: the calling attention module.
        query: (1, H, P, D).
        key: (1, H, P, D).
        value: (1, H, P, D).
        attention_mask: None with `image_params`.
        image_params: where images end; None where the stock tower calls, with its mask.
        options: scaling, dropout.

    Returns:
        (1, P, H, D) and no weights.
    """
    if image_params is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if options.get("dropout"):
        raise CapabilityError(
            "attention dropout is not supported in the vision tower; set attention_dropout of "
            "vision_config to 0 in the model's config.json"
        )
    # Rotary leaves queries and keys in float32 under autocast; kernels want one dtype.
    q, k, v = (part[0].transpose(0, 1).to(value.dtype) for part in (query, key, value))
    function = _best_attention(value.device, value.dtype)
    output = function(q, k, v, image_params, causal=False, scale=options.get("scaling"))
    return output[None], None


@cache
def _best_attention(device: torch.device, dtype: torch.dtype) -> VarlenAttention:
    return choose_attention("auto", device=device, dtype=dtype).function


def tower_output(tower: Any, media: Media) -> Tensor:
    """(P, W) the last layer's output for the patches of all images; as the tower's forward, which
    takes padded images and a mask."""
    _use_images_attention(tower)
    rows, side = media.pixel_values, tower.patch_size
    embeds = tower.patch_conv(rows.view(rows.shape[0], -1, side, side)).flatten(1)[None]
    embeds = tower.ln_pre(embeds)
    places = torch.cat(
        [torch.cartesian_prod(torch.arange(h), torch.arange(w)) for _, h, w in media.grid_thw]
    )
    rotary = tower.patch_positional_embedding(embeds, places.to(rows.device, non_blocking=True))
    hidden: Tensor = tower.transformer(
        embeds,
        attention_mask=None,
        position_embeddings=rotary,
        image_params=_boundaries(media),
    ).last_hidden_state
    return hidden[0]


def _use_images_attention(tower: Any) -> None:
    """For good: a layer that is computed again in the backward pass must find it too."""
    if tower.config._attn_implementation == ATTENTION:
        return
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, images_attention)
    tower.set_attn_implementation(ATTENTION)


def _boundaries(media: Media) -> PackedSeqParams:
    """A segment for each image."""
    lengths = tuple(t * h * w for t, h, w in media.grid_thw)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    ends = ends.to(media.pixel_values.device, non_blocking=True)
    return PackedSeqParams(
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        segment_lengths=lengths,
    )
