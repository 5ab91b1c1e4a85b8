"""An objective of its own in one file: Focal Loss (1708.02002) averaged over answers.

    torchrun --nproc-per-node N toy_objective.py FOLDER LAYOUT[,LAYOUT...]

Takes one optimizer step of it in each layout of the Megatron engine; writes FOLDER/<layout>.json
(the step's figures, those of validation) and .safetensors (gradients).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from support.engines import make_stepper
from support.layouts import LAYOUTS, collator, make_megatron, one_layout, use_sgd
from support.shards import TINY_MODEL, mixed_samples
from torch import Tensor

from vlmpack.distributed import stop_process_group
from vlmpack.encode import Encoder
from vlmpack.packing import Batch, EncodedSample
from vlmpack.training.objective import Objective

SPLIT = ([0, 1, 2], [3], [4, 5])
"""Micro-batches of the step, by the places of their samples."""


def focal(losses: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Tokens that the model is sure of count less."""
    missed = 1 - (-losses).exp()
    return {"loss_sum": (missed**2 * losses).sum(), "plain_sum": losses.sum()}


def count_answers(batch: Batch) -> int:
    """Twice as many as samples, which no count of the step is."""
    return 2 * len(batch.keys)


FOCAL = Objective(
    sums=focal,
    sum_names=("loss_sum", "plain_sum"),
    counts={"num_halves": count_answers},
    divisor="num_halves",
    report={"plain_loss": ("plain_sum", "num_label_tokens")},
)


def take_step(
    engine: Any, samples: list[EncodedSample], layout: str = "one", objective: Objective = FOCAL
) -> tuple[dict[str, float | None], dict[str, Tensor]]:
    """One step of gradient descent: what it reports, and the gradients that it took."""
    stepper = make_stepper(engine, objective=objective, max_grad_norm=None)
    use_sgd(engine)
    stepper.schedule = lambda step: 1.0
    collate = collator(LAYOUTS[layout])
    mine = SPLIT[stepper.ranks.dp_rank :: LAYOUTS[layout].dp]
    batches = [collate([samples[place] for place in places]) for places in mine]
    evaluated = stepper.evaluate(batches)
    before = whole(engine)
    sums, _ = stepper.train(0, batches, num_skipped=0, stop=False)
    after = whole(engine)
    assert objective.reported(evaluated.totals) == objective.reported(sums.totals)
    return (
        {"loss": sums.loss, "norm": sums.grad_norm, **objective.reported(sums.totals)},
        {name: before[name] - after[name] for name in before},
    )


def whole(engine: Any) -> dict[str, Tensor]:
    """Whole parameters of either engine, under transformers' names."""
    named = engine.whole_tensors() if hasattr(engine, "whole_tensors") else engine.parameters()
    return {name: tensor.detach().clone() for name, tensor in named}


def main(folder: Path, names: list[str]) -> None:
    """Each layout in turn."""
    encoder = Encoder(TINY_MODEL)
    samples = [encoder.encode(sample.cooked()) for sample in mixed_samples()]
    for name in names:
        with one_layout(LAYOUTS[name]) as ranks:
            figures, gradients = take_step(make_megatron(LAYOUTS[name], ranks), samples, name)
        if ranks.is_main:
            (folder / f"{name}.json").write_text(json.dumps(figures), encoding="utf-8")
            save_file(gradients, str(folder / f"{name}.safetensors"))
    stop_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","))
