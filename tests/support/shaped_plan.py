"""What `vlmpack plan` says of the memory of a step that `benchmarks/operators.py` records."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from gpu_shapes import SHAPES
from operator_step import Asked, drawn_samples, groups_of, micro_batches, write_folder
from support.engines import ADAMW
from support.plans import mode_of

from vlmpack.backends.policy import TrainingPolicy
from vlmpack.encode import Encoder
from vlmpack.forecast.activations import forms_on
from vlmpack.forecast.figures import MemoryFigures
from vlmpack.forecast.memory import memory_figures
from vlmpack.forecast.parameters import read_sizes
from vlmpack.forecast.trained import trained_sizes
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.recipe.trainable import TrainableSection


def write_headers(folder: Path, config: Any) -> None:
    """A weight file with the names and shapes of a model, and zeros that take no room on a disk."""
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    header, end = {}, 0
    tied = set(model._tied_weights_keys or ())
    for name, value in model.state_dict().items():
        if name not in tied:
            places = [end, end := end + 2 * value.numel()]
            header[name] = {"dtype": "BF16", "shape": [*value.shape], "data_offsets": places}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def planned(asked: Asked, folder: Path) -> MemoryFigures:
    """Of the step's largest row, on a GPU whose fused layers run."""
    shape = SHAPES[asked.shape]
    write_headers(folder, write_folder(shape, folder))
    encoder = Encoder(folder)
    groups = groups_of(asked, drawn_samples(shape, encoder, 300))
    rows = micro_batches(asked, encoder, groups)
    largest = mode_of(
        max_row_slots=max(row.num_slots for row in rows),
        max_row_patches=max(row.media.pixel_values.shape[0] for row in rows if row.media),
    )
    parts = {"language": asked.language, "vision": asked.vision, "projector": asked.projector}
    policy = TrainingPolicy(trainable=TrainableSection(**parts), optim=ADAMW)
    model = ModelSection(
        path=str(folder),
        dtype="bfloat16",
        attention="torch_varlen",
        fused_layers="liger",
        activation_checkpointing=asked.recompute,
    )
    return memory_figures(
        model,
        ParallelismSection(),
        read_sizes(folder),
        largest,
        global_batch_size=asked.rows,
        world_size=1,
        trained=trained_sizes(policy, encoder),
        forms=forms_on(torch.device("cuda"), model),
    )
