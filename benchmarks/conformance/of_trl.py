"""TRL's collators, as SFTTrainer makes them: padded, `padding_free=True`, and `packing=True`."""

from __future__ import annotations

from datasets import Dataset
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from benchmarks.conformance.of_transformers import images_of, plain
from benchmarks.conformance.subject import LANGUAGE, VISION, Case, encoder

PACKAGES = ("trl", "datasets")


def packed(samples, strategy, collate):
    """Rows of `pack_dataset`, then the collator."""
    width = sum(len(s["input_ids"]) for s in samples)
    rows = pack_dataset(Dataset.from_list(plain(samples)), seq_length=width, strategy=strategy)
    return dict(collate([dict(row) for row in rows]))


def cases():
    pad = encoder(LANGUAGE).pad_token_id
    padded = DataCollatorForLanguageModeling(pad_token_id=pad)
    free = DataCollatorForLanguageModeling(pad_token_id=pad, padding_free=True)
    for attention in ("sdpa", "flash"):
        yield Case(
            what="DataCollatorForLanguageModeling (padded)",
            model=LANGUAGE,
            attention=attention,
            collate=lambda s: dict(padded(plain(s))),
        )
        yield Case(
            what="padding_free=True",
            model=LANGUAGE,
            attention=attention,
            collate=lambda s: dict(free(plain(s))),
        )
        yield Case(
            what="packing=True, packing_strategy=bfd",
            model=LANGUAGE,
            attention=attention,
            collate=lambda s: packed(s, "bfd", free),
        )
        yield Case(
            what="packing=True, packing_strategy=wrapped",
            model=LANGUAGE,
            attention=attention,
            collate=lambda s: packed(s, "wrapped", padded),
            note="the strategy is documented to ignore boundaries",
        )
        yield Case(
            what="padding_free=True, on a vision-language model",
            model=VISION,
            attention=attention,
            collate=lambda s: dict(free(plain(s))) | images_of(s),
            note="SFTTrainer refuses it for vision data sets; pixels and token types joined by "
            "hand",
        )
