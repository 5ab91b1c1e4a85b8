"""transformers' own collators."""

from __future__ import annotations

import torch
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, DataCollatorWithFlattening

from benchmarks.conformance.subject import LANGUAGE, VISION, Case, folder

PACKAGES = ("transformers",)


def plain(samples):
    return [{k: s[k].tolist() for k in ("input_ids", "labels")} for s in samples]


def images_of(samples):
    """What the collator leaves out, joined by hand as its user has to."""
    found = {"mm_token_type_ids": torch.cat([s["mm_token_type_ids"] for s in samples])[None]}
    for name in ("pixel_values", "image_grid_thw"):
        parts = [s[name] for s in samples if name in s]
        if parts:
            found[name] = torch.cat(parts)
    return found


def cases():
    tokenizer = AutoTokenizer.from_pretrained(folder(LANGUAGE))
    pad = DataCollatorForSeq2Seq(tokenizer, return_tensors="pt")
    for attention in ("sdpa", "flash"):
        yield Case(
            what="DataCollatorForSeq2Seq (padded)",
            model=LANGUAGE,
            attention=attention,
            collate=lambda s: dict(pad(plain(s))),
        )
    flat = DataCollatorWithFlattening(return_tensors="pt")
    told = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)
    for name in (LANGUAGE, VISION):
        for attention in ("sdpa", "flash"):
            for words, collator in (("", flat), ("return_flash_attn_kwargs=True", told)):
                if words and attention == "sdpa":
                    continue
                yield Case(
                    what=f"DataCollatorWithFlattening({words})",
                    model=name,
                    attention=attention,
                    collate=lambda s, c=collator, n=name: (
                        dict(c(plain(s))) | (images_of(s) if n == VISION else {})
                    ),
                    note="pixels and token types joined by hand" if name == VISION else "",
                )
