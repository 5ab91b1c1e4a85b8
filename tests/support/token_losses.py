"""The loss of every label token, by sample, in any parallel layout of the Megatron engine.

    torchrun --nproc-per-node N token_losses.py FOLDER DTYPE ATTENTION LAYOUT[,LAYOUT...]

Writes FOLDER/<layout>-<attention>-<dtype>.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from support.engines import EVERYTHING, engine_of
from support.layouts import LAYOUTS, Layout, collator, one_layout
from support.runs import split_by_sample
from support.shards import TINY_MODEL, read_shard
from torch import Tensor

from vlmpack.distributed import Ranks, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.packing import EncodedSample, PackedBatch
from vlmpack.recipe.schema import ModelSection
from vlmpack.training.objective import forward_step

BINS = 4
"""Micro-batches."""

Losses = dict[str, list[float]]


@cache
def labelled() -> list[EncodedSample]:
    """Samples that are asked for every token: more than 1,000 labels."""
    encoder = Encoder(TINY_MODEL)
    found = []
    for sample in read_shard()[:32]:
        encoded = encoder.encode(sample.cooked())
        labels = torch.cat([encoded.input_ids[1:], torch.tensor([-100])])
        found.append(replace(encoded, labels=labels))
    assert sum(sample.length - 1 for sample in found) > 1000
    return found


def make_megatron(layout: Layout, ranks: Ranks, dtype: str, attention: str) -> Any:
    """An engine on the tiny model."""
    model: Any = ModelSection(
        path=str(TINY_MODEL),
        backend="mcore",
        dtype=dtype,
        attention=attention,
        activation_checkpointing=layout.recompute,
    )
    return engine_of(model, layout.sizes, Encoder(TINY_MODEL), ranks, EVERYTHING)


def token_losses(engine: Any, batches: list[PackedBatch]) -> Losses:
    """What this rank computes of them: its CP share, on the last stage, on the first TP rank.

    A token that another CP rank holds is nan.
    """
    outputs: list[Tensor] = []

    def recording(data_iterator: Iterator[Any], model: Any) -> Any:
        output, loss_function = forward_step(data_iterator, model)
        outputs.append(output.detach().float().cpu())
        return output, loss_function

    engine.forward_backward(
        recording, iter(batches), num_microbatches=len(batches), forward_only=True
    )
    if not engine.last or engine.groups.tp.rank():
        return {}
    found: Losses = {}
    for batch, output in zip(batches, outputs, strict=True):
        context = engine.prepare(batch).context
        slots = batch.label_positions
        if context is not None:
            slots = context.row_index[context.label_positions]
        whole = torch.full((batch.num_slots,), float("nan")).index_copy(0, slots, output)
        by_sample = split_by_sample(batch, whole[batch.label_positions])
        found.update({key: losses.tolist() for key, losses in by_sample.items()})
    return found


def merged(shares: list[Losses]) -> dict[str, Tensor]:
    """Every loss, each from the rank that has it."""
    found: dict[str, Tensor] = {}
    for share in shares:
        for key, losses in share.items():
            mine = torch.tensor(losses)
            there = found.get(key, torch.full_like(mine, float("nan")))
            assert not bool((mine.isfinite() & there.isfinite()).any()), "computed twice"
            found[key] = torch.where(there.isfinite(), there, mine)
    assert all(bool(losses.isfinite().all()) for losses in found.values())
    return found


def in_rows(layout: Layout) -> list[PackedBatch]:
    """All samples in a few rows."""
    samples = labelled()
    collate = collator(layout)
    return [collate(samples[start::BINS]) for start in range(BINS)]


def one_by_one() -> list[PackedBatch]:
    """Each sample in a row of its own."""
    collate = collator(LAYOUTS["one"])
    return [collate([sample]) for sample in labelled()]


def main(folder: Path, dtype: str, attention: str, names: list[str]) -> None:
    """Each layout in turn."""
    for name in names:
        layout = LAYOUTS[name]
        with one_layout(layout) as ranks:
            engine = make_megatron(layout, ranks, dtype, attention)
            rows = in_rows(layout)[ranks.dp_rank :: layout.dp]
            everywhere = merged(ranks.gather_objects(token_losses(engine, rows)))
        if ranks.is_main:
            losses = {key: value.tolist() for key, value in everywhere.items()}
            path = folder / f"{name}-{attention}-{dtype}.json"
            path.write_text(json.dumps(losses), encoding="utf-8")
    stop_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4].split(","))
