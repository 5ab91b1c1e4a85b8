"""Run in ranks: export, generation, and steps of a model whose head is its own.

    torchrun --nproc-per-node 2 round_trip_worker.py FOLDER

FOLDER/untied holds a model. Writes FOLDER/<layout>/ (the exported folder of the tiny model),
FOLDER/<layout>-<rank>.pt (logits of the model that `generation` yields), FOLDER/<layout>-untied.*
(see `support.layouts.Trained`) and FOLDER/<layout>-untied/ (the trained model, exported).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from support.layouts import LAYOUTS, Trained, make_megatron, one_layout, stepper_with, train
from support.layouts import whole_weights as collect_weights
from support.shards import TINY_MODEL, mixed_samples
from support.stock import StockProcessor
from torch import Tensor

from vlmpack.distributed import Ranks, stop_process_group

NAMES = ("tp2", "pp2")


def logits(model: Any) -> Tensor:
    """Of a sample with two images."""
    inputs = StockProcessor(TINY_MODEL)(mixed_samples()[0])
    with torch.no_grad():
        return model(
            input_ids=inputs.input_ids,
            attention_mask=torch.ones_like(inputs.input_ids),
            mm_token_type_ids=inputs.mm_token_type_ids,
            use_cache=False,
            **inputs.media,
        ).logits


def export_and_generate(name: str, folder: Path, ranks: Ranks) -> None:
    """The tiny model as it was read."""
    engine = make_megatron(LAYOUTS[name], ranks)
    engine.export(folder / name, processor_from=TINY_MODEL, dtype=torch.bfloat16)
    with engine.generation() as model:
        assert not model.training
        torch.save(logits(model), folder / f"{name}-{ranks.rank}.pt")


def train_untied(name: str, folder: Path, ranks: Ranks) -> None:
    """The usual steps with SGD."""
    layout = LAYOUTS[name]
    engine = make_megatron(layout, ranks, folder / "untied")
    rows = train(stepper_with(engine, "sgd"), layout)
    weights, same = collect_weights(engine)
    assert same, "copies of a weight have drifted apart"
    if ranks.is_main:
        Trained(rows, weights).save(folder / f"{name}-untied")
    engine.export(folder / f"{name}-untied", processor_from=TINY_MODEL, dtype=None)


def main(folder: Path) -> None:
    """Both, in each layout."""
    for name in NAMES:
        with one_layout(LAYOUTS[name]) as ranks:
            export_and_generate(name, folder, ranks)
            train_untied(name, folder, ranks)
    stop_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
