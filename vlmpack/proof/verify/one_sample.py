"""One sample on the folder's own weights, forward alone: stock, then packed beside another sample.

For a model that is too large for all of `verify`: its weights are there once, without gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmpack.attention import choose_attention
from vlmpack.backends.hf.attention import register_attention
from vlmpack.backends.hf.load import load_model
from vlmpack.backends.hf.recurrence import replace_kernels
from vlmpack.backends.hf.whole_model import packed_model
from vlmpack.data.pipeline import TrainData
from vlmpack.encode import Encoder
from vlmpack.families.base import stock_arguments
from vlmpack.packing import EncodedSample, PackCollator
from vlmpack.packing.pairs import sequences_of
from vlmpack.proof.measure import LOSS_BOUND, Check, bounded, loss_error, with_noise
from vlmpack.proof.stock import require_finite_losses, token_losses
from vlmpack.proof.verify.memory import require_room_for_weights
from vlmpack.proof.verify.samples import choose_samples
from vlmpack.recurrence import choose_recurrence
from vlmpack.words import counted

NAME = "loss of one sample on the folder's weights"


SAMPLES = 6
"""Samples that the two are chosen from: no image, one, and several."""


def check_one_sample(encoder: Encoder, train: TrainData) -> Check:
    """A sample with labels, and with images where there are any: alone and packed behind another,
    in float32 on the host.

    Args:
        encoder: of the model folder.
        train: the samples.

    Raises:
        ModelError: the folder's weights cannot be loaded.
        CapabilityError: the host has no room for them.
    """
    require_room_for_weights(encoder.folder)
    chosen = choose_samples(train, SAMPLES)
    most = max(chosen, key=lambda each: (each.num_labels > 0, each.num_images))
    sample, other = most.sample, next(each.sample for each in chosen if each is not most)
    model = load_model(encoder.folder).eval()
    with torch.no_grad():
        alone = _stock_losses(model, encoder, sample)
        require_finite_losses(
            f"verify: the stock model on {sample.key}",
            model,
            [alone],
            lambda: _stock_losses(model, encoder, sample),
        )
        again = _stock_losses(model, encoder, sample, padding=7)
        packed = _packed_losses(model, encoder, sample, other)
    return bounded(
        NAME,
        loss_error(packed, alone),
        with_noise(LOSS_BOUND, loss_error(again, alone)),
        noise=loss_error(again, alone),
        detail=f"{sample.key}, {len(alone)} label tokens, "
        f"{counted(most.num_images, 'image')}, float32, no gradients",
        look_at="`vlmpack verify --tiny`, which says more",
    )


def _stock_losses(model: Any, encoder: Encoder, sample: EncodedSample, padding: int = 0) -> Tensor:
    """(l,) of the stock model, each sequence by itself, with so many slots of padding at the
    right."""
    parts = sequences_of(sample)
    if len(parts) > 1:
        return torch.cat([_stock_losses(model, encoder, part, padding) for part in parts])
    given = stock_arguments(encoder.family, sample, **encoder.placeholders)
    fill = {"input_ids": encoder.pad_token_id, "attention_mask": 0}
    fill |= dict.fromkeys(encoder.family.token_arguments(given["input_ids"] < 0), 0)
    padded = {
        name: F.pad(value, (0, padding), value=fill[name]) if name in fill else value
        for name, value in given.items()
    }
    logits = model(use_cache=False, **padded).logits[:, : sample.length]
    return token_losses(logits, sample.labels[None], shifted=True)


def _packed_losses(
    model: Any, encoder: Encoder, sample: EncodedSample, other: EncodedSample
) -> Tensor:
    """(l,) of the sample behind another one in a row."""
    cpu, dtype = torch.device("cpu"), torch.float32
    packed = packed_model(model, encoder)
    choice = choose_attention("segments", device=cpu, dtype=dtype, image_blocks=False)
    packed.language.set_attn_implementation(register_attention(choice))
    replace_kernels(packed.language, choose_recurrence(device=cpu, dtype=dtype))
    collator = PackCollator(
        pad_token_id=encoder.pad_token_id, num_position_axes=encoder.num_position_axes
    )
    batch = collator([other, sample])
    losses: Tensor = packed(batch, batch.packed_seq_params())
    return losses[batch.label_positions >= other.length]
