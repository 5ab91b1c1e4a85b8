"""ms-swift's template collator: padded, and `--packing` / `--padding_free`."""

from __future__ import annotations

from swift.model import get_model_processor
from swift.template import get_template

from benchmarks.conformance.subject import LANGUAGE, VISION, Case, folder, model

PACKAGES = ("ms-swift",)
TYPES = {LANGUAGE: ("qwen3", "qwen3"), VISION: ("qwen2_5_vl", "qwen2_5_vl")}


def rows(samples):
    """What a template's encode leaves of a sample; the ids are the judge's own."""
    found = []
    for one in samples:
        row = {k: v for k, v in one.items() if k != "attention_mask"}
        row["input_ids"], row["labels"] = row["input_ids"].tolist(), row["labels"].tolist()
        row["length"] = len(row["input_ids"])
        found.append(row)
    return found


def template_of(name, padding_free):
    _, processor = get_model_processor(
        str(folder(name)), load_model=False, model_type=TYPES[name][0]
    )
    template = get_template(processor, template_type=TYPES[name][1], padding_free=padding_free)
    template.set_mode("train")
    template.model = model(name, "sdpa")
    return template


def cases():
    for name in (LANGUAGE, VISION):
        for free in (False, True):
            template = template_of(name, free)
            for attention in ("sdpa", "flash"):
                yield Case(
                    what="packing=True, padding_free=True" if free else "padded",
                    model=name,
                    attention=attention,
                    collate=lambda s, t=template: dict(t.data_collator(rows(s))),
                    note="ms-swift refuses packing without flash-attn"
                    if free and attention == "sdpa"
                    else "",
                )
