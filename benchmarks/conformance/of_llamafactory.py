"""LLaMA-Factory's collator as its sft workflow makes it: padded, `packing`, `neat_packing`.

Ids, labels and pixels are the judge's own: its templates and image settings make others.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from llamafactory.data.collator import SFTDataCollatorWith4DAttentionMask
from llamafactory.data.processor.supervised import PackedSupervisedDatasetProcessor
from transformers import AutoTokenizer

from benchmarks.conformance.subject import LANGUAGE, VISION, Case, folder, model

PACKAGES = ("llamafactory",)


def image_parts(sample):
    """(pixels, grid) of each image."""
    if "image_grid_thw" not in sample:
        return []
    grids = sample["image_grid_thw"]
    return list(zip(sample["pixel_values"].split(grids.prod(1).tolist()), grids, strict=True))


def mm_inputs(images, *_):
    """What its plugin makes of images: they are made already."""
    if not images:
        return {}
    return {
        "pixel_values": torch.cat([pixels for pixels, _ in images]),
        "image_grid_thw": torch.stack([grid for _, grid in images]),
    }


def packed(samples, tokenizer, neat, cutoff_len):
    """The rows of its packing processor over samples that are encoded already."""
    order = iter(samples)

    def encode(**_):
        one = next(order)
        return one["input_ids"].tolist(), one["labels"].tolist()

    processor = SimpleNamespace(
        tokenizer=tokenizer,
        data_args=SimpleNamespace(cutoff_len=cutoff_len, neat_packing=neat),
        _encode_data_example=encode,
    )
    none = [None] * len(samples)
    examples = {
        "_prompt": [[0]] * len(samples),
        "_response": [[0]] * len(samples),
        "_system": none,
        "_tools": none,
        "_images": [image_parts(s) for s in samples],
        "_videos": none,
        "_audios": none,
    }
    columns = PackedSupervisedDatasetProcessor.preprocess_dataset(processor, examples)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def unpacked(samples):
    return [
        {
            "input_ids": s["input_ids"].tolist(),
            "attention_mask": [1] * len(s["input_ids"]),
            "labels": s["labels"].tolist(),
            "images": image_parts(s),
        }
        for s in samples
    ]


def collator_of(name, attention, neat):
    tokenizer = AutoTokenizer.from_pretrained(folder(name))
    tokenizer.padding_side = "right"
    plugin = SimpleNamespace(
        image_token="<|image_pad|>" if name == VISION else None,
        audio_token=None,
        get_mm_inputs=mm_inputs,
    )
    made = SFTDataCollatorWith4DAttentionMask(
        template=SimpleNamespace(mm_plugin=plugin),
        model=model(name, "sdpa"),
        tokenizer=tokenizer,
        pad_to_multiple_of=8,
        label_pad_token_id=-100,
        block_diag_attn=neat and attention != "flash",
        neat_packing=neat,
        attn_implementation="flash_attention_2" if attention == "flash" else "sdpa",
        compute_dtype=torch.float32,
    )
    return made, tokenizer


def as_batch(made):
    """Its Trainer passes no None on, and rope_deltas are for generation."""
    return {k: v for k, v in made.items() if v is not None and k != "rope_deltas"}


WAYS = (
    ("padded", False, 0),
    ("packing: true", False, 1023),
    ("packing: true", False, 1024),
    ("neat_packing: true", True, 1023),
    ("neat_packing: true", True, 1024),
)
"""A row has cutoff_len + 1 tokens; the collator pads ids to a multiple of 8, and positions not."""


def cases():
    for name in (LANGUAGE, VISION):
        for attention in ("sdpa", "flash"):
            for what, neat, cutoff in WAYS:
                collator, tokenizer = collator_of(name, attention, neat)

                def collate(samples, c=collator, t=tokenizer, n=neat, cutoff=cutoff):
                    rows = packed(samples, t, n, cutoff) if cutoff else unpacked(samples)
                    return as_batch(c(rows))

                yield Case(
                    what=f"{what}, cutoff_len: {cutoff}" if cutoff else what,
                    model=name,
                    attention=attention,
                    collate=collate,
                )
