"""Collators as other trainers have them, right and broken ones, and samples as they take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from support.shards import mixed_samples, text_samples
from torch import Tensor

from vlmpack.encode import Encoder
from vlmpack.families.base import stock_arguments
from vlmpack.packing import IGNORE_INDEX, EncodedSample
from vlmpack.proof.judge.alone import own_positions
from vlmpack.proof.stock import token_losses

Feature = dict[str, Any]
ROWS = ("input_ids", "labels", "mm_token_type_ids", "token_type_ids", "attention_mask")
VARLEN = "varlen_by_boundaries"


def features(encoder: Encoder, *, images: bool) -> list[Feature]:
    """Samples as mappings of unbatched values, labels where transformers has them."""
    chosen = mixed_samples() if images else text_samples()
    return [feature(encoder, encoder.encode(sample.cooked())) for sample in chosen]


def feature(encoder: Encoder, encoded: EncodedSample) -> Feature:
    """One of them."""
    given = stock_arguments(encoder.family, encoded, **encoder.placeholders)
    labels = torch.full_like(encoded.labels, IGNORE_INDEX)
    labels[1:] = encoded.labels[:-1]
    one = {n: v[0] if n in ROWS else v for n, v in given.items() if isinstance(v, Tensor)}
    one.pop("position_ids", None)
    return one | {"labels": labels}


def media(samples: Sequence[Feature]) -> Feature:
    names = dict.fromkeys(n for one in samples for n in one if n not in ROWS)
    return {n: torch.cat([one[n] for one in samples if n in one]) for n in names}


def padded(samples: Sequence[Feature]) -> Feature:
    """Rows padded at the right, as transformers' own collators do it."""
    width = max(len(one["input_ids"]) for one in samples)
    fill = {"labels": IGNORE_INDEX}
    made = {
        name: torch.stack(
            [
                F.pad(one[name], (0, width - len(one[name])), value=fill.get(name, 0))
                for one in samples
            ]
        )
        for name in samples[0]
        if name in ROWS and name != "attention_mask"
    }
    lengths = torch.tensor([len(one["input_ids"]) for one in samples])
    made["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()
    return made | media(samples)


def packing(model: Any) -> Callable[[Sequence[Feature]], Feature]:
    """One row, as ms-swift has it: text positions and the class's own beside them, boundaries as
    keyword arguments, the first label of each sample masked."""

    def collate(samples: Sequence[Feature]) -> Feature:
        lengths = [len(one["input_ids"]) for one in samples]
        made = {
            name: torch.cat([one[name] for one in samples])[None]
            for name in samples[0]
            if name in ROWS and name not in ("labels", "attention_mask")
        }
        labels = [one["labels"].clone() for one in samples]
        for each in labels:
            each[0] = IGNORE_INDEX
        made["labels"] = torch.cat(labels)[None]
        text = torch.cat([torch.arange(length) for length in lengths])
        own = [own_positions(model, _alone(one)) for one in samples]
        if own[0] is None:
            made["position_ids"] = text[None]
        else:
            made["position_ids"] = torch.cat([text[None], torch.cat(own, 1)])[:, None]  # type: ignore[arg-type]
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        made |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        made |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        return made | media(samples)

    return collate


def _alone(one: Feature) -> Feature:
    return {n: v[None] if n in ROWS else v for n, v in one.items() if n != "labels"}


def varlen(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> Any:
    """What a varlen kernel computes, exactly: causal attention inside each boundary."""
    ends = options.get("cu_seq_lens_q")
    bounds = [0, query.shape[2]] if ends is None else ends.tolist()
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    parts = [
        F.scaled_dot_product_attention(
            query[:, :, a:b], key[:, :, a:b], value[:, :, a:b],
            is_causal=True, scale=options.get("scaling"),
        )
        for a, b in pairwise(bounds)
    ]  # fmt: skip
    return torch.cat(parts, 2).transpose(1, 2), None


def load(folder: Path, encoder: Encoder, *, packed: bool) -> Any:
    """The stock model in float32, with a stand-in for a varlen kernel where rows are packed."""
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN, varlen)
    model = encoder.family.auto_class().from_pretrained(str(folder), dtype=torch.float32)
    if packed:
        model.get_submodule(encoder.family.modules.language).set_attn_implementation(VARLEN)
    return model


def broken(collate: Callable[[Sequence[Feature]], Feature], fault: str) -> Any:
    """The same collator with one fault."""

    def made(samples: Sequence[Feature]) -> Feature:
        batch = collate(samples)
        total = batch["input_ids"].shape[1]
        match fault:
            case "isolation":
                for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
                    del batch[name]
            case "positions over the row":
                starts = torch.tensor([0, *(len(one["input_ids"]) for one in samples)]).cumsum(0)
                shift = torch.cat([torch.full((b - a,), int(a)) for a, b in pairwise(starts)])
                batch["position_ids"] = batch["position_ids"] + shift
            case "one-axis positions":
                batch["position_ids"] = batch["position_ids"][0]
            case "label shift":
                batch["labels"] = F.pad(batch["labels"], (1, 0), value=IGNORE_INDEX)[:, :total]
            case "double shift":
                batch["labels"] = F.pad(batch["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:]
            case "pixels swapped":
                batch["pixel_values"] = media(list(reversed(samples)))["pixel_values"]
            case "labels across samples":
                at = len(samples[0]["input_ids"])
                batch["labels"][0, at] = batch["input_ids"][0, at]
            case "labels on padding":
                batch = with_tail(batch)
                batch["labels"][0, -1] = 0
            case "other labels":
                at = int((batch["labels"][0] != IGNORE_INDEX).nonzero()[0, 0])
                batch["labels"][0, at] = IGNORE_INDEX
            case "other positions":
                batch["position_ids"][..., : len(samples[0]["input_ids"])] *= 2
            case "other pixels":
                batch["pixel_values"] = batch["pixel_values"] * 1.1
            case "tokens lost":
                for name in ("input_ids", "labels"):
                    batch[name] = batch[name][:, : total - 3]
            case "samples written":
                for one in samples:
                    one["labels"][:] = one["labels"].roll(-1)
            case "refused":
                del batch["labels"]
            case _:
                raise ValueError(fault)
        return batch

    return made


def with_tail(batch: Feature, slots: int = 3) -> Feature:
    """A packed row, filled up behind its last sample, as fixed shapes want it."""
    fill = {"labels": IGNORE_INDEX}
    made = {
        name: F.pad(value, (0, slots), value=fill.get(name, 0))
        if name in (*ROWS, "position_ids")
        else value
        for name, value in batch.items()
    }
    ends = batch["cu_seq_lens_q"]
    ends = torch.cat([ends, ends[-1:] + slots])
    return {**made, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}


def smoothed(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """Losses of another function than those of each sample alone."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**given, use_cache=False).logits
    wide = logits.float().log_softmax(-1).mean(-1)[:, :-1]
    return (
        0.9 * token_losses(logits, batch["labels"])
        - 0.1 * wide[batch["labels"][:, 1:] != IGNORE_INDEX]
    )


def half_learnt(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """The right losses, with half of their gradients."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    losses = token_losses(model(**given, use_cache=False).logits, batch["labels"])
    return (losses + losses.detach()) / 2


def mean_of(model: Any, batches: Sequence[Mapping[str, Any]]) -> Tensor:
    """The mean of each micro-batch's mean."""
    return torch.stack([summed(model, one)[0] / summed(model, one)[1] for one in batches]).mean()


def by_token(model: Any, batches: Sequence[Mapping[str, Any]]) -> Tensor:
    """All losses, divided once."""
    parts = [summed(model, one) for one in batches]
    return torch.stack([p[0] for p in parts]).sum() / sum(p[1] for p in parts)


def summed(model: Any, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
    given = {name: value for name, value in batch.items() if name != "labels"}
    losses = token_losses(model(**given, use_cache=False).logits, batch["labels"])
    return losses.sum(), len(losses)
