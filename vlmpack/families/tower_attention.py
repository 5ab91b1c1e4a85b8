"""Attention of vision towers: all images of a batch, or all of their windows, in one call.

It is registered with transformers under its own names. The text's function has another name and
other arguments, and each refuses the other's. So no image is cut where a sample ends, and no sample
where an image ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vlmpack.attention import VarlenAttention, choose_attention, segment_attention
from vlmpack.attention.eager import eager
from vlmpack.errors import CapabilityError
from vlmpack.kernel_operators import is_plain
from vlmpack.packing import Media, PackedSeqParams, move_batch
from vlmpack.packing.batch import TowerInputs, TowerRule, TowerSegments

ROWS = "vlmpack_images"
"""For towers that hand over all patches as one row whatever computes attention."""

FLASH_ROWS = "vlmpack_flash_images"
"""For towers that do so for what transformers takes for flash attention, by its name, and call
others once for each image and window, with lengths that they read on the host."""

OF_TEXT = ("packed_seq_params", "padded_rows", "image_masks")
"""Arguments that tell the language model's attention where samples end."""


@eager
def tower_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tower_inputs: TowerInputs | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention inside each image or window of a row of patches, in both directions.

    Args:
        query: (1, H, P, D).
        key: (1, H, P, D).
        value: (1, H, P, D).
        attention_mask: None with `tower_inputs`.
        tower_inputs: where images and windows end; None when the class's own forward calls.
        cu_seq_lens_q: (n + 1,) int32, which must be one of the tensors of `tower_inputs`. It says
            whether a block attends in images or in windows.

    Returns:
        (1, P, H, D) and no weights.

    Raises:
        CapabilityError: boundaries of the text, others than those of `tower_inputs`, or dropout.
    """
    bounds = [name for name in OF_TEXT if options.get(name) is not None]
    if bounds:
        raise CapabilityError(
            f"{type(module).__name__} of the vision tower was called with {bounds[0]}, where the "
            f"text's samples end; images end elsewhere"
        )
    if tower_inputs is None and cu_seq_lens_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if options.get("dropout"):
        raise CapabilityError(
            "attention dropout is not supported in the vision tower; set attention_dropout of "
            "vision_config to 0 in the model's config.json"
        )
    segments = _segments(tower_inputs, cu_seq_lens_q)
    # Rotary leaves queries and keys in float32 under autocast; kernels want one dtype.
    q, k, v = (x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value))
    function = segment_attention if is_plain() else _best_attention(value.device, value.dtype)
    output = function(q, k, v, _params(segments), causal=False, scale=options.get("scaling"))
    return output[None], None


def _segments(inputs: TowerInputs | None, cu_seqlens: Tensor | None) -> TowerSegments:
    """Those that a block wants; read from the device where the class's own forward calls alone."""
    if inputs is None:
        assert cu_seqlens is not None
        return TowerSegments(cu_seqlens=cu_seqlens, lengths=tuple(cu_seqlens.diff().tolist()))
    if cu_seqlens is None or cu_seqlens is inputs.images.cu_seqlens:
        return inputs.images
    if inputs.windows is None or cu_seqlens is not inputs.windows.cu_seqlens:
        raise CapabilityError(
            "a block of the vision tower attends inside other boundaries than those of the batch's "
            "images and windows. This version of transformers derives them again"
        )
    return inputs.windows


def _params(segments: TowerSegments) -> PackedSeqParams:
    return PackedSeqParams(
        cu_seqlens_q=segments.cu_seqlens,
        cu_seqlens_kv=segments.cu_seqlens,
        max_seqlen_q=segments.max_seqlen,
        max_seqlen_kv=segments.max_seqlen,
        segment_lengths=segments.lengths,
    )


@cache
def _best_attention(device: torch.device, dtype: torch.dtype) -> VarlenAttention:
    return choose_attention("auto", device=device, dtype=dtype).function


def inputs_of(
    make_rule: Callable[[Mapping[str, Any]], TowerRule], tower: Any, media: Media
) -> TowerInputs:
    """The tower's inputs for the images of a batch, from the batch or made here from its grids."""
    if media.tower is not None:
        return media.tower
    made = make_rule(tower.config.to_dict())(media.grid_thw)
    return move_batch(made, media.pixel_values.device)


def use_tower_attention(tower: Any, name: str) -> None:
    """Set a tower's attention permanently, because recomputation in the backward pass needs it too.

    The class's own forward still works.
    """
    if tower.config._attn_implementation == name:
        return
    from transformers import AttentionInterface

    AttentionInterface.register(name, tower_attention)
    # set_attn_implementation looks on the hub for whatever has "flash" in its name.
    tower.config._attn_implementation = name
