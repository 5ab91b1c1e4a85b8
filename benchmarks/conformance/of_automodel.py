"""NeMo Automodel's neat packing: its packers and collators, on transformers' models.

It shifts labels before it packs and drops each sample's last token. Samples get one more token
that is not learnt, so that the judge finds all of its own in the row.
"""

from __future__ import annotations

import torch
from nemo_automodel.components.datasets.llm.neat_packing import _build_packed_sample
from nemo_automodel.components.datasets.utils import neat_packed_collater
from nemo_automodel.components.datasets.vlm.collate_fns import neat_packed_vlm_collater
from nemo_automodel.components.datasets.vlm.neat_packing_vlm import (
    _build_packed_vlm_sample,
    _compute_mrope_position_ids,
    _shift_sample,
)

from benchmarks.conformance.subject import LANGUAGE, VISION, Case, encoder, model, samples

PACKAGES = ("nemo_automodel",)

KEPT = ("_packed_seq_ids", "n_images_per_sample")
"""What its loop takes out of the batch before the model sees it."""


def longer(sample, pad):
    """One more token, which nothing learns."""
    found = dict(sample)
    found["attention_mask"] = torch.ones_like(sample["input_ids"])
    ends = {"input_ids": pad, "labels": -100, "attention_mask": 1, "mm_token_type_ids": 0}
    for name, value in ends.items():
        if name in found:
            found[name] = torch.cat([found[name], torch.tensor([value]).to(found[name])])
    return found


def text(given, attention):
    pad = encoder(LANGUAGE).pad_token_id
    shifted = [_shift_sample(longer(s, pad)) for s in given]
    width = sum(len(s["input_ids"]) for s in shifted) + 5
    row = _build_packed_sample(shifted, width, pad)
    return neat_packed_collater([row], attn_implementation=attention)


def vision(given, attention, counter):
    pad = encoder(VISION).pad_token_id
    shifted = []
    for sample in given:
        whole = longer(sample, pad)
        whole["position_ids"] = _compute_mrope_position_ids(whole, counter.get_rope_index)
        shifted.append(_shift_sample(whole, has_mrope=True))
    width = sum(len(s["input_ids"]) for s in shifted)
    row = _build_packed_vlm_sample(shifted, width, pad, has_mrope=True)
    return neat_packed_vlm_collater(
        [row], padding_idx=pad, max_length=width + 5, attn_implementation=attention
    )


def batch_of(made):
    found = {k: v for k, v in made.items() if k not in KEPT and v is not None}
    if "pixel_values" in found:
        found["pixel_values"] = found["pixel_values"].float()
    return found


def rounded():
    """Samples whose pixels are bfloat16 numbers: the collator rounds them, which is no packing."""
    found = samples(VISION)
    for one in found:
        if "pixel_values" in one:
            one["pixel_values"] = one["pixel_values"].bfloat16().float()
    return found


def changed(sample):
    """For the search for leaks: other ordinary tokens, pixels that bfloat16 holds."""
    found = {**sample, "input_ids": sample["input_ids"].clone(), "labels": sample["labels"].clone()}
    taught = found["labels"] != -100
    found["input_ids"][taught] = found["input_ids"][taught].roll(1)
    found["labels"][taught] = found["input_ids"][taught]
    if "pixel_values" in found:
        found["pixel_values"] = found["pixel_values"].flip(0)
    return found


def cases():
    counter = model(VISION, "sdpa").model
    for attention, name in (("sdpa", "sdpa"), ("flash", "flash_attention_2")):
        yield Case(
            what="neat_packed_collater",
            model=LANGUAGE,
            attention=attention,
            collate=lambda s, n=name: batch_of(text(s, n)),
            given={"labels": "shifted"},
            note="on transformers' class",
        )
        yield Case(
            what="neat_packed_vlm_collater",
            model=VISION,
            attention=attention,
            collate=lambda s, n=name: batch_of(vision(s, n, counter)),
            samples=rounded(),
            given={"labels": "shifted", "change": changed},
            note="on transformers' class; the collator rounds pixels to bfloat16, and so were the "
            "reference's",
        )
