"""Run in ranks: the gradients of a run's first global batch, by packing mode and what is trained.

    torchrun --nproc-per-node N context_modes.py FOLDER CONTEXT CASE ...

A case is NAME[+heads]-MODE-TRAINED: with many heads all ranks exchange them. FOLDER has what
`prepare` writes. Writes FOLDER/CASE.json (the loss, and how ranks shared rows) and .safetensors
(gradients).
"""

from __future__ import annotations

import json
import sys
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from backends.hf.context_rows import gradients
from safetensors.torch import save_file
from support.families import TEXT_FAMILIES, tiny_family_folder
from support.many_heads import many_heads_folder
from support.recipes import changed, copy_samples
from support.shards import ROOT
from torch import Tensor

from tools.sweep.one import write_shard
from vlmpack.build.data import build_encoder, data_spec, open_split
from vlmpack.build.engine import build_engine, engine_spec
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.packs.write import PackOrder
from vlmpack.distributed import Ranks, start_process_group, stop_process_group
from vlmpack.recipe import load_recipe
from vlmpack.run.packs import pack_recipe

MANY = "+heads"
PLANNED = {"training__micro_batch_size": 1, "training__global_batch_size": 2}
MODES: dict[str, dict[str, Any]] = {
    "in_batch": {"packing__mode": "in_batch"},
    "online": {"packing__mode": "online", **PLANNED},
    "offline": {"packing__mode": "offline", **PLANNED},
}
TRAINED: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"trainable": {"vision": "full", "projector": "frozen", "language": "lora"}},
}
"""Adapters, and the tower, whose images processes share out."""


def settings_of(folder: Path, case: str, context: int) -> dict[str, Any]:
    """The recipe of a case."""
    name, mode, trained = case.rsplit("-", 2)
    has_text_alone = name.removesuffix(MANY) in TEXT_FAMILIES
    split = {"context": context}
    if context > 1 and name.endswith(MANY):
        split["context_heads"] = context
    settings = {
        "model": {"path": str(folder / name), "dtype": "float32"},
        "data": {
            "train": str(folder / ("text.tar" if has_text_alone else "images.tar")),
            "num_workers": 0,
            "index_dir": str(folder / f"index-{name}"),
        },
        "packing": {"alignment": 16},
        "parallelism": split,
        "training": {
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "seq_length": 256 if has_text_alone else 1024,
            "max_steps": 1,
        },
        "optim": {"lr": 1e-4},
        "run_dir": str(folder / "run"),
    }
    settings = changed(settings, **MODES[mode], **TRAINED[trained])
    if trained == "lora" and has_text_alone:
        settings["trainable"] = {"language": "lora"}
    if mode == "offline":
        settings["packing"]["path"] = str(folder / f"packs-{name}")
    return settings


def prepare(folder: Path, cases: list[str]) -> None:
    """Write shards, and the model and the packs of each case."""
    write_shard(folder / "text.tar", images=False)
    copy_samples(ROOT / "assets/digits/train-000000.tar", folder / "images.tar", 22)
    for name in {case.rsplit("-", 2)[0] for case in cases}:
        (folder / name).mkdir()
        make = many_heads_folder if name.endswith(MANY) else tiny_family_folder
        model = make(name.removesuffix(MANY), folder / name)
        if model != folder / name:
            (folder / name).rmdir()
            (folder / name).symlink_to(model)
        if any(case.startswith(f"{name}-offline-") for case in cases):
            online = load_recipe(settings_of(folder, f"{name}-online-full", 1))
            pack_recipe(online, folder / f"packs-{name}", PackOrder())


def first_batch(folder: Path, case: str, ranks: Ranks) -> tuple[float, dict[str, Tensor], str]:
    """The loss and the gradients of a run's first global batch, and how its ranks share rows.
    Collective."""
    recipe = load_recipe(settings_of(folder, case, ranks.replica_size))
    encoder = build_encoder(recipe)
    train = open_split(data_spec(recipe, encoder, ranks), "data.train", Ledger(None))
    assert train is not None
    try:
        place = {"rank": ranks.dp_rank, "dp": ranks.dp_size, "replica": ranks}
        with closing(train.batches(train.start(), max_steps=1, **place)) as steps:
            rows = [each.batch for each in next(steps).micro_batches]
    finally:
        train.split.close()
    assert len(rows) == 2 and len(rows[0].keys) > 1 and all(row.num_label_tokens for row in rows)
    engine: Any = build_engine(engine_spec(recipe, encoder, ranks))
    with torch.no_grad():
        for name, parameter in engine.parameters():  # adapters begin at zero
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=draw))
    how = "" if engine.context is None else engine.context.described()
    return *gradients(engine, rows), how


def main(folder: Path, context: int, cases: list[str]) -> None:
    ranks = start_process_group(context=context)
    for case in cases:
        loss, ours, how = first_batch(folder, case, ranks)
        if ranks.is_main:
            (folder / f"{case}.json").write_text(json.dumps([loss, how]))
            save_file(ours, folder / f"{case}.safetensors")
    stop_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
