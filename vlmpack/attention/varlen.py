"""Varlen attention: one signature, several kernels, chosen once and reported.

`segment_attention` is one scaled_dot_product_attention call per run of equal segments. It works on
any device and in any dtype. On a CPU it is the fastest exact form. A block-diagonal mask would
compute T x T scores, and nested tensors have no causal kernel.

`boundary_attention` reads segments only from the boundaries' tensor, as a dense mask of T x T
scores. No operator and no shape depends on a row's segments, so a graph can record it on a device
without a varlen kernel. It is too slow for large rows.

The kernels for CUDA are torch's own and flash-attn's. Both see physical boundaries. For a causal
model an alignment gap counts as its segment's tail. Neither has been run on a GPU by this version's
tests unless docs/gpu.md says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from vlmpack.attention.blocks import BlockMasks
from vlmpack.attention.flash_packages import (
    FLASH_PACKAGES,
    FlashName,
    flash_varlen,
    why_no_flash,
)
from vlmpack.attention.wide import why_no_wide_heads, wide_attention
from vlmpack.errors import CapabilityError
from vlmpack.packing.batch import PackedSeqParams

BLOCKS_NEED_MASKS = (
    "an image's tokens attend in both directions here, which takes a mask; segments has one"
)


HEAD_MULTIPLE = 8
"""torch's kernel, and flash-attn's without its public function, refuse heads of other widths."""


def whole_heads(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Query, key and value padded to a head width that the kernels take, and the factor of their
    scores.

    Zeros after the channels change no score. The first channels of the output are the result.

    Args:
        query, key, value: (T, H, D) each, of one D.
        scale: 1 / sqrt(D) if None.
    """
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    missing = -width % HEAD_MULTIPLE
    if missing:
        query, key, value = (nn.functional.pad(part, (0, missing)) for part in (query, key, value))
    return query, key, value, scale


@cache
def _takes_groups(varlen_attn: Callable[..., object]) -> bool:
    """Whether this torch's has a grouped-query form; 2.11's has none."""
    return "enable_gqa" in signature(varlen_attn).parameters


def _varlen_attention(
    name: FlashName | Literal["torch_varlen"],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: PackedSeqParams,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    masks: BlockMasks | None = None,
) -> Tensor:
    """A kernel of CUDA, for bf16 or fp16.

    Arguments and result as `segment_attention`; refuses masks (CapabilityError).
    """
    if masks is not None:
        raise CapabilityError(f"{name} cannot run: {BLOCKS_NEED_MASKS}")
    if params.prefix_tree is not None:
        raise ValueError(f"segments with a shared prefix need more than one call of {name}")
    left = -1 if window is None else window - 1
    sides = (left, 0 if causal else left)
    cu = params.cu_seqlens_physical
    if name != "torch_varlen":
        unbounded = FLASH_PACKAGES[name].unbounded
        output: Tensor | tuple[Tensor, Tensor] = flash_varlen(name)(
            query,
            key,
            value,
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            max_seqlen_q=params.max_seqlen_q,
            max_seqlen_k=params.max_seqlen_kv,
            softmax_scale=scale,
            causal=causal,
            window_size=tuple(unbounded if side < 0 else side for side in sides),
        )
        return output[0] if isinstance(output, tuple) else output  # 4 adds the log-sum-exp
    bounds = (cu, cu, params.max_seqlen_q, params.max_seqlen_kv)
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    grouped: dict[str, Any] = {}
    if groups > 1 and _takes_groups(varlen_attn):
        grouped = {"enable_gqa": True}
    elif groups > 1:  # as often in memory
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    own = query.shape[-1]
    query, key, value, scale = whole_heads(query, key, value, scale)
    attended = varlen_attn(query, key, value, *bounds, scale=scale, window_size=sides, **grouped)
    assert isinstance(attended, Tensor)  # a tuple only where the log-sum-exp was asked for
    return attended[..., :own]


torch_varlen_attention = partial(_varlen_attention, "torch_varlen")
"""`torch.nn.attention.varlen.varlen_attn` (torch >= 2.10)."""

flash_attention = partial(_varlen_attention, "flash_attn")
"""`flash_attn.flash_attn_varlen_func` (the `flash-attn` extra)."""

flash_attention_3 = partial(_varlen_attention, "flash_attn_3")
flash_attention_4 = partial(_varlen_attention, "flash_attn_4")


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """(length, length) bool, True where |q - k| < window. None if that is everywhere."""
    if window is None or window >= length:
        return None
    everywhere = torch.ones(length, length, dtype=torch.bool, device=device)
    return everywhere.tril_(window - 1).triu_(1 - window)


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: PackedSeqParams,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    masks: BlockMasks | None = None,
) -> Tensor:
    """Attention inside each segment of a THD row, never across.

    Runs of segments of one length share a call, as a view of shape (run, length, heads, width).
    Bidirectional segments of one length share it wherever they lie, because a vision tower has many
    short ones, its attention windows.

    Args:
        query: (T, Hq, D).
        key: (T, Hkv, D); Hq is a multiple of Hkv (grouped-query attention).
        value: (T, Hkv, D).
        params: the boundaries; physical segments are used, which is exact for causal attention
            because no real token attends to the gap after it.
        causal: whether a token sees only itself and what came before it in its segment.
        scale: factor on the scores; 1 / sqrt(D) if None.
        window: sliding window in tokens, the token itself included; None for the whole segment.
        masks: which parts of the segments attend in both directions; None for none. Segments
            without one keep the causal kernel.

    Returns:
        (T, Hq, D).

    Raises:
        ValueError: attention is bidirectional, and segments have alignment gaps or come with
            `masks`. The masks belong to other segments, or a segment continues another.
    """
    if params.prefix_tree is not None:
        raise ValueError("segments with a shared prefix need prefix_attention")
    if masks is not None and (not causal or masks.lengths != params.segment_lengths):
        raise ValueError("masks of image blocks go with causal attention over the same segments")
    if not causal and params.cu_seqlens_q_padded is not None:
        raise ValueError("bidirectional attention needs segments without alignment gaps")
    if not causal:
        return _bidirectional(query, key, value, params.segment_lengths, scale, window)
    lengths = params.segment_lengths
    if masks is None and window is not None:
        masks = BlockMasks(lengths, (), query.device)
    blocks = masks.of_segment if masks is not None else ((),) * len(lengths)
    runs = [
        (length, inside, len(list(run)))
        for (length, inside), run in groupby(zip(lengths, blocks, strict=True))
        if length
    ]
    # Split, not sliced: the backward of every slice would fill a whole row with zeros.
    sizes = [count * length for length, _, count in runs]
    parts = zip(*(whole.split(sizes) for whole in (query, key, value)), strict=True)
    outputs: list[Tensor] = []
    for (length, inside, count), qkv in zip(runs, parts, strict=True):
        q, k, v = (part.view(count, length, *part.shape[1:]).transpose(1, 2) for part in qkv)
        mask = masks.mask(length, inside, window) if masks is not None else None
        out = dense_attention(q, k, v, mask=mask, causal=True, scale=scale)
        outputs.append(out.transpose(1, 2).reshape(count * length, *query.shape[1:]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _bidirectional(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    scale: float | None,
    window: int | None,
) -> Tensor:
    """(T, Hq, D). Each segment sees itself. There is one call for each length."""
    runs = [(length, len(list(run))) for length, run in groupby(lengths) if length]
    pieces = [
        whole.split([length * count for length, count in runs]) for whole in (query, key, value)
    ]
    places: dict[int, list[int]] = {}
    for place, (length, _) in enumerate(runs):
        places.setdefault(length, []).append(place)
    outputs: dict[int, Tensor] = {}
    for length, same in places.items():
        qkv = [
            own[same[0]] if len(same) == 1 else torch.cat([own[n] for n in same]) for own in pieces
        ]
        q, k, v = (part.view(-1, length, *part.shape[1:]).transpose(1, 2) for part in qkv)
        mask = _band(length, window, query.device)
        out = dense_attention(q, k, v, mask=mask, causal=False, scale=scale)
        flat = out.transpose(1, 2).reshape(-1, *query.shape[1:])
        outputs.update(zip(same, flat.split([length * runs[n][1] for n in same]), strict=True))
    return torch.cat([outputs[place] for place in range(len(runs))])


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """`scaled_dot_product_attention` with grouped queries.

    Keys and values are repeated where there is a mask. Of the CUDA kernels that take one, only the
    one that stores all scores has a grouped-query form.

    Args:
        query: (B, Hq, S, D).
        key: (B, Hkv, S, D).
        value: (B, Hkv, S, D).
        mask: bool, True where a query sees a key, as broadcasts to (B, Hq, S, S); or None.
        causal: without a mask, whether a token sees nothing after it.
        scale: factor on the scores; 1 / sqrt(D) if None.

    Returns:
        (B, Hq, S, D).
    """
    groups = query.shape[1] // key.shape[1]
    if mask is not None and groups > 1:
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=mask is None and groups > 1,
    )


def boundary_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: PackedSeqParams,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    masks: BlockMasks | None = None,
) -> Tensor:
    """Attention inside each segment of a THD row, never across; arguments and result as
    `segment_attention`.

    Raises:
        ValueError: masks of image blocks, or segments that continue others.
    """
    if params.prefix_tree is not None or masks is not None:
        raise ValueError("boundaries alone say nothing of shared prefixes and of image blocks")
    slots = torch.arange(query.shape[0], dtype=torch.int32, device=query.device)
    # A boundary that repeats the last one owns no slot.
    segment = torch.searchsorted(params.cu_seqlens_physical[1:], slots, right=True)
    seen = segment[:, None] == segment
    behind = slots[:, None] - slots
    if causal:
        seen = seen & (behind >= 0)
    if window is not None:
        seen = seen & (behind.abs() < window)
    q, k, v = (part.transpose(0, 1)[None] for part in (query, key, value))
    output = dense_attention(q, k, v, mask=seen, causal=causal, scale=scale)
    return output.squeeze(0).transpose(0, 1)


AttentionName = Literal["segments", "torch_varlen", FlashName]

ImplementationName = Literal[AttentionName, "boundaries"]
"""`boundaries` is no name of a recipe: what is recorded where no varlen kernel runs."""


VarlenAttention = Callable[..., Tensor]
"""Attention inside the segments of a THD row. Its arguments are those of `segment_attention`."""


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The attention implementation that runs, and the reason.

    Args:
        image_blocks: whether each call must say which tokens attend in both directions.
        wide_heads: whether `function` has our kernel for heads that others are too narrow for.
    """

    name: ImplementationName
    function: VarlenAttention
    reason: str
    image_blocks: bool = False
    wide_heads: bool = False


_FUNCTIONS: dict[ImplementationName, VarlenAttention] = {
    "segments": segment_attention,
    "boundaries": boundary_attention,
    "torch_varlen": torch_varlen_attention,
    "flash_attn": flash_attention,
    "flash_attn_3": flash_attention_3,
    "flash_attn_4": flash_attention_4,
}


HALVES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
"""Channels of a head that flash-attn and torch's varlen kernel, which is made of it, can have."""


def why_unavailable(
    name: ImplementationName,
    device: torch.device,
    dtype: torch.dtype,
    *,
    image_blocks: bool = False,
    largest_head: int = 0,
    fixed_shape: bool = False,
) -> str | None:
    """Why an implementation cannot run here, or None if it can."""
    if name == "segments":
        return "segments follows lengths on the host, which no graph can" if fixed_shape else None
    if image_blocks:
        return BLOCKS_NEED_MASKS
    if name == "boundaries":
        quadratic = "boundaries computes T x T scores: for tests on a CPU"
        return quadratic if device.type == "cuda" else None
    if device.type != "cuda":
        return f"{name} needs a CUDA device, this one is {device.type}"
    if dtype not in HALVES:
        return f"{name} needs bfloat16 or float16, the model computes in {dtype}"
    if largest_head > LARGEST_HEAD and (why := why_no_wide_heads(largest_head, device)):
        return f"{name} takes heads of at most {LARGEST_HEAD} channels, and {why}"
    if name != "torch_varlen":
        return why_no_flash(name, device)
    try:
        importlib.import_module("torch.nn.attention.varlen")
    except ImportError as error:
        return (
            f"torch.nn.attention.varlen cannot be imported ({error}); wanted: torch 2.10 or newer"
        )
    return None


def with_wide_heads(narrow: VarlenAttention) -> VarlenAttention:
    """Our kernel in layers with heads that others are too narrow for, which are causal over whole
    segments, and `narrow` in the others."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        params: PackedSeqParams,
        *,
        scale: float | None = None,
        window: int | None = None,
        masks: BlockMasks | None = None,
    ) -> Tensor:
        is_causal = window is None and (masks is None or masks.is_causal)
        if query.shape[-1] > LARGEST_HEAD and is_causal:
            return wide_attention(query, key, value, params.cu_seqlens_physical, scale=scale)
        return narrow(query, key, value, params, scale=scale, window=window, masks=masks)

    return attend


def choose_attention(
    requested: AttentionName | Literal["auto"],
    *,
    device: torch.device,
    dtype: torch.dtype,
    image_blocks: bool = False,
    largest_head: int = 0,
    fixed_shape: bool = False,
) -> AttentionChoice:
    """Choose the varlen implementation once, at build time.

    Args:
        requested: `model.attention` of the recipe. `auto` takes the first that can run of
            flash_attn, torch_varlen, segments. For captured rows `boundaries` is the last one.
            FlashAttention 3 and 4, which have not passed on a GPU, run by name alone.
        image_blocks: whether the tokens of an image attend in both directions.
        largest_head: channels of the widest head, where kernels may support fewer; 0 where not.
        fixed_shape: whether a graph will capture the rows, so that nothing may depend on segments.

    Raises:
        CapabilityError: the requested one cannot run here; the message says why.
    """
    candidates: tuple[ImplementationName, ...] = ("flash_attn", "torch_varlen", "segments")
    if fixed_shape:
        candidates = (*candidates[:-1], "boundaries")
    if requested != "auto":
        candidates = (requested,)
    refused: list[str] = []
    for name in candidates:
        why = why_unavailable(
            name,
            device,
            dtype,
            image_blocks=image_blocks,
            largest_head=largest_head,
            fixed_shape=fixed_shape,
        )
        if why is None:
            first = "as the recipe asks" if name == requested else "first choice"
            reason, function = "; ".join(refused) or first, _FUNCTIONS[name]
            narrow = dtype not in HALVES or largest_head <= LARGEST_HEAD or requested == "segments"
            is_wide = not narrow and why_no_wide_heads(largest_head, device) is None
            if is_wide:
                reason += f"; heads of {largest_head} channels by vlmpack's Triton kernel"
                function = with_wide_heads(function)
            return AttentionChoice(name, function, reason, image_blocks, is_wide)
        if why not in refused:
            refused.append(why)
    instead = "set training.cuda_graphs: none" if fixed_shape else "use auto or segments"
    raise CapabilityError(f"model.attention: {requested} cannot run: {refused[0]}; {instead}")
