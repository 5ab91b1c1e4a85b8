"""One training run that ends after some steps and writes what it measured, for `gpu.py`.

A process of its own, so that its peak of memory is one mode's alone:
`python benchmarks/gpu_run.py OUT.json STEPS RECIPE key=value ...`. The run is `vlmpack finetune`'s;
two of its methods are wrapped, and it is left before it writes its weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlmpack.api import resolve, run_recipe
from vlmpack.build.data import build_encoder
from vlmpack.encode import Encoder
from vlmpack.packing import Batch, EncodedSample, PackCollator, PackedBatch
from vlmpack.packing.balance import CostModel
from vlmpack.packing.image_owners import select_images
from vlmpack.training.metrics import MetricsLog
from vlmpack.training.step import Stepper

WARM_UP = 5
"""First steps that are left out of every rate."""


class Measured(BaseException):
    """Enough steps were taken; nothing is to be saved."""


@dataclass(slots=True)
class Measurement:
    """What one run leaves.

    Args:
        cost: FLOPs of a training step of the model.
        encoder: of the run, for the rows of one sample.
        device: that the run computes on.
        steps: how many to take.
        flops: of each step, by formula: padding and recomputation never count.
        rows: of metrics.jsonl.
        loss_difference: of the first step's rows from their samples one by one, relative.
    """

    cost: CostModel
    encoder: Encoder
    device: torch.device
    steps: int
    flops: list[float] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    loss_difference: float = float("nan")

    def before_step(self, stepper: Stepper, step: int, batches: Sequence[Batch]) -> None:
        """Count the step's FLOPs; hold the first one's rows to their samples."""
        self.flops.append(sum(flops_of(batch, self.cost) for batch in batches))
        if step > 0:
            return
        singles = [one for batch in batches for one in singled(batch, self.encoder)]
        together, alone = (stepper.evaluate(part).loss for part in (batches, singles))
        assert together and alone, "the first step has no label token"
        self.loss_difference = abs(together - alone) / alone
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def figures(self) -> dict[str, object]:
        """Sums over the steps after the first ones."""
        rows, flops = self.rows[WARM_UP:], self.flops[WARM_UP : len(self.rows)]
        total = {
            name: sum(row[name] for row in rows)
            for name in ("num_tokens", "num_slots", "seconds", "data_wait_seconds")
        }
        on_gpu = self.device.type == "cuda"
        return {
            "tokens_per_second": total["num_tokens"] / total["seconds"],
            "flops_per_second": sum(flops) / total["seconds"],
            "fill": total["num_tokens"] / total["num_slots"],
            "data_wait_share": total["data_wait_seconds"] / total["seconds"],
            "peak_bytes": torch.cuda.max_memory_allocated(self.device) if on_gpu else None,
            "loss_difference": self.loss_difference,
            "losses": [row["loss"] for row in self.rows],
            "steps": len(rows),
        }


def flops_of(batch: Batch, cost: CostModel) -> float:
    """Of a training step on the samples of a batch, whatever row they lie in."""
    grids = () if batch.media is None else batch.media.grid_thw
    patches = [prod(grid) for grid in grids]
    lengths = np.array(batch.lengths, dtype=np.int64)
    return float(
        cost(
            np.array([lengths.sum()]),
            np.array([(lengths**2).sum()]),
            np.array([sum(patches)]),
            patch_squares=np.array([sum(count**2 for count in patches)]),
            labels=np.array([batch.num_label_tokens]),
        ).sum()
    )


def singled(batch: Batch, encoder: Encoder) -> list[PackedBatch]:
    """Each sample of a batch in a row of its own."""
    axes = batch.position_ids.shape[0]
    ids, labels = batch.input_ids.flatten(), batch.labels.flatten()
    positions = batch.position_ids.reshape(axes, -1)
    width = batch.input_ids.shape[1]
    widths = batch.segment_lengths if isinstance(batch, PackedBatch) else (width,) * len(batch.keys)
    collate = PackCollator(pad_token_id=encoder.pad_token_id, num_position_axes=axes)
    rows, start, image, feature = [], 0, 0, 0
    for key, length, physical in zip(batch.keys, batch.lengths, widths, strict=False):
        stop = start + length
        places = batch.media_positions
        places = places[(places >= start) & (places < stop)] - start
        first, feature = image, feature + places.numel()
        counts = () if batch.media is None else batch.media.num_tokens
        while sum(counts[:image]) < feature:
            image += 1
        media = select_images(batch.media, range(first, image)) if batch.media else None
        sample = EncodedSample(
            key=key,
            input_ids=ids[start:stop],
            labels=labels[start:stop],
            position_ids=positions[:, start:stop],
            media=media,
            media_positions=places,
        )
        rows.append(collate([sample]))
        start += physical
    return rows


def watch(measurement: Measurement) -> None:
    """Wrap what a run calls once a step."""
    train, write = Stepper.train, MetricsLog.write

    def watched_train(self: Stepper, step: int, batches: Sequence[Batch], **named: Any) -> Any:
        measurement.before_step(self, step, batches)
        return train(self, step, batches, **named)

    def watched_write(self: MetricsLog, row: dict[str, Any]) -> None:
        write(self, row)
        if "num_samples" in row:
            measurement.rows.append(row)
        if len(measurement.rows) == measurement.steps:
            raise Measured

    Stepper.train, MetricsLog.write = watched_train, watched_write  # type: ignore[method-assign]


def main() -> None:
    """Run, write the figures."""
    out, steps, recipe_path, *overrides = sys.argv[1:]
    changes = dict(pair.split("=", 1) for pair in overrides)
    recipe = resolve(recipe_path, {key: json.loads(value) for key, value in changes.items()})
    encoder = build_encoder(recipe)
    config = json.loads((Path(recipe.model.path) / "config.json").read_text(encoding="utf-8"))
    measurement = Measurement(
        cost=encoder.family.cost_model(config),
        encoder=encoder,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        steps=int(steps),
    )
    watch(measurement)
    try:
        run_recipe(recipe)
    except Measured:
        Path(out).write_text(json.dumps(measurement.figures()), encoding="utf-8")


if __name__ == "__main__":
    main()
