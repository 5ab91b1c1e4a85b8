"""An objective that makes the step of chosen samples a step that is not finite, in one of four
places.

    planted.py RECIPE|DUMP {"key": "pixels"} key=value ...      a run or a replay, as one process
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack import finetune, replay
from vlmpack.backends.engine import LossFunction
from vlmpack.data.loading.loader import GlobalStep
from vlmpack.packing import Batch, PackedBatch
from vlmpack.recipe import load_recipe
from vlmpack.training.objective import Objective, forward_step

PLACES = ("pixels", "layer", "objective", "gradient")
"""In the sample's first image; in the output of the second decoder layer at its tokens; in its loss
sum; in the gradient of its losses."""
LAYER = "language_model.layers.1"


def leader_of(step: GlobalStep) -> str:
    """The key of a sample that stands first in its row, with an image: any fault can be planted at
    it."""
    rows = (micro.batch for micro in step.micro_batches)
    return next(row.keys[0] for row in rows if leads_with_image(row))


def leads_with_image(row: Batch) -> bool:
    assert isinstance(row, PackedBatch)
    return row.media is not None and bool(row.media_positions[0] < row.segment_lengths[0])


def planted(
    plants: Mapping[str, str], transient: Collection[str] = (), value: float = math.nan
) -> Objective:
    """Cross entropy with faults.

    Args:
        plants: key of a sample -> one of PLACES, or `company`: in the loss sum of a
            row with others.
        transient: keys whose fault comes once in this process, and never again.
    """
    met: set[str] = set()

    def step(data_iterator: Iterator[Batch], model: nn.Module) -> tuple[Tensor, LossFunction]:
        batch = next(data_iterator)
        places = {
            plants[key]: place
            for place, key in enumerate(batch.keys)
            if key in plants and not (key in met and key in transient)
        }
        met.update(batch.keys)
        if not places:
            return forward_step(iter([batch]), model)
        assert isinstance(batch, PackedBatch)
        media = batch.media
        if "pixels" in places and media is not None and media.pixel_values is not None:
            pixels = media.pixel_values.clone()
            pixels[:1] = value  # of the row's first image, which is the sample's by the plan
            batch = replace(batch, media=replace(media, pixel_values=pixels))
        hooks = []
        if "layer" in places:
            starts = batch.cu_seqlens_padded if batch.cu_seqlens_padded is not None else None
            ends = (starts if starts is not None else batch.cu_seqlens).tolist()
            first, last = ends[places["layer"]], ends[places["layer"] + 1]

            def spoil(module: nn.Module, inputs: Any, output: Any) -> Any:
                hidden = output[0] if isinstance(output, tuple) else output
                mask = torch.zeros(hidden.shape[1], dtype=torch.bool)
                mask[first:last] = True
                spoilt = hidden.masked_fill(mask[None, :, None], value)
                return (spoilt, *output[1:]) if isinstance(output, tuple) else spoilt

            layer = next(m for n, m in model.named_modules() if n.endswith(LAYER))
            hooks.append(layer.register_forward_hook(spoil))
        losses, summed = forward_step(iter([batch]), model)
        for hook in hooks:
            hook.remove()
        if "gradient" in places:
            losses.register_hook(lambda gradient: gradient * value)
        if "objective" in places or ("company" in places and len(batch.keys) > 1):

            def spoilt_sum(output: Tensor) -> tuple[Tensor, int, dict[str, Tensor]]:
                whole, number, report = summed(output)
                return whole * value, number, {name: one * value for name, one in report.items()}

            return losses, spoilt_sum
        return losses, summed

    return Objective(forward_step=step)


if __name__ == "__main__":
    recipe, plants, *overrides = sys.argv[1:]
    faults = planted(json.loads(plants))
    if Path(recipe).parent.name == "dumps":
        print(json.dumps(replay(recipe, objective=faults).as_json()))
    else:
        finetune(load_recipe(Path(recipe), overrides), objective=faults)
