"""What a training loop of your own takes from vlmpack; docs/own-loop.md has two such loops.

    record and images -> encode_sample -> pack_batch_sequences, as a collate_fn -> PackedBatch
    a transformers model -> packed_model;  both -> vlm_step -> losses of the label tokens

Names and signatures here stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vlmpack.attention import choose_attention
from vlmpack.attention.varlen import AttentionName
from vlmpack.backends.engine import LossFunction
from vlmpack.backends.hf.attention import register_attention
from vlmpack.backends.hf.model import PackedLM
from vlmpack.backends.hf.model import packed_model as wrapped
from vlmpack.backends.hf.recurrence import recurrence_kinds, replace_kernels
from vlmpack.data.shards.samples import cook_text
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.packing import Batch, EncodedSample
from vlmpack.recurrence import RecurrenceName, choose_recurrence
from vlmpack.training.objective import forward_step


def encode_sample(
    encoder: Encoder,
    record: Mapping[str, Any],
    images: Mapping[str, bytes] | None = None,
    *,
    key: str = "sample",
) -> EncodedSample:
    """Tokens, shifted labels, positions and pixels of one conversation, on CPU.

    Args:
        record: what a shard's `.json` member holds: `messages`, or LLaVA's `conversations`.
        images: encoded image files by name, `{"0.jpg": data}`; parts of the record that name no
            image take them in this order.
        key: what messages call the sample.

    Returns:
        input_ids (s,) and labels (s,) int64, position_ids (A, s), and the images' patches.

    Raises:
        DataError: a record or an image that cannot be used; says what was expected.
    """
    files = {} if images is None else images
    document = json.dumps(record).encode()
    cooked = cook_text(key, "none", document, ("json", *files))
    data = tuple(files[name] for name in cooked.image_fields)
    return encoder.encode(replace(cooked.sample, images=data))


def packed_model(
    model: nn.Module,
    encoder: Encoder,
    *,
    attention: AttentionName | Literal["auto"] = "auto",
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    recurrence: RecurrenceName = "auto",
) -> PackedLM:
    """A transformers model as a module that takes packed rows; its weights are the same tensors.

    The decoder's attention is set to one that knows where samples end. For `generate`, set it back
    by `model.set_attn_implementation("sdpa")`. `save_pretrained` needs no change. Layers that carry
    state are replaced too. They work as before for rows that do not say their segments.

    Args:
        attention: as `model.attention` of a recipe.
        device: where it will compute; None for where the model is now.
        dtype: what attention will compute in (that of an autocast); None for the model's own.
        recurrence: as `model.recurrence` of a recipe.

    Returns:
        A module from (batch, packed_seq_params) to the (L,) losses of the row's label tokens.

    Raises:
        CapabilityError: a model that cannot be packed, or an attention or kernels of recurrences
            that cannot run there.
    """
    if encoder.family.proven_by_verify:
        raise CapabilityError(
            f"no family of ours serves {encoder.family.name}, so it trains only after `vlmpack "
            "verify` has passed on it. `vlmpack finetune` checks that before the first step, and "
            "a training loop outside of it does not"
        )
    weight = next(model.parameters())
    device = weight.device if device is None else device
    dtype = weight.dtype if dtype is None else dtype
    family = encoder.family
    choice = choose_attention(
        attention,
        device=device,
        dtype=dtype,
        image_blocks=family.modules.image_blocks,
        largest_head=family.largest_head,
    )
    packed = wrapped(model, encoder)
    packed.language.set_attn_implementation(register_attention(choice))
    kinds = recurrence_kinds(packed.language)
    recurrences = choose_recurrence(recurrence, device=device, dtype=dtype, kinds=kinds)
    replace_kernels(packed.language, recurrences)
    return packed


def vlm_step(data_iterator: Iterator[Batch], model: nn.Module) -> tuple[Tensor, LossFunction]:
    """One micro-batch through the model, as Megatron's schedules call a forward step.

    Args:
        data_iterator: its next batch is taken, and moved to the model's device.
        model: `packed_model`'s, or what DDP or FSDP made of it.

    Returns:
        (L,) float32, -log p of each label token, in the order of the row; and the function that a
        schedule sums them with. Divide their sum by the label tokens (`batch.num_label_tokens`) of
        all micro-batches and processes of the optimizer step.
    """
    return forward_step(data_iterator, model)
