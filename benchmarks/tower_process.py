"""The vision tower of one checkout in a process of its own.

    python tower_process.py CHECKOUT WIDTH GRIDS

GRIDS are `rows x columns` of each image in patches, with commas between them. The first answer is
how often a forward calls `scaled_dot_product_attention`; each line on stdin is then one forward and
backward of tower and projector on all images, answered by its CPU seconds. The model is an
untrained one of the tiny model's shape, in float32, its tower so wide.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Calls(TorchFunctionMode):
    """Counts calls of the attention that PyTorch has for a CPU."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") == "scaled_dot_product_attention"
        return func(*args, **(kwargs or {}))


def main(checkout: str, width: int, grids: str) -> None:
    """Answer until stdin ends."""
    sys.path.insert(0, checkout)
    from transformers import AutoConfig, AutoModelForImageTextToText

    import vlmpack
    from vlmpack.families.registry import family_of
    from vlmpack.packing import Media

    assert Path(vlmpack.__file__).is_relative_to(Path(checkout).resolve())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = Path(checkout) / "assets" / "tiny-qwen2_5_vl"
    config = AutoConfig.from_pretrained(folder)
    vision = config.vision_config
    vision.hidden_size, vision.intermediate_size = width, 2 * width
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    grid_thw = tuple((1, *map(int, grid.split("x"))) for grid in grids.split(","))
    patches = [h * w for _, h, w in grid_thw]
    media = Media(
        pixel_values=torch.randn(sum(patches), 3 * 2 * 14 * 14),
        grid_thw=grid_thw,
        num_tokens=tuple(count // 4 for count in patches),
    )
    family = family_of(folder)
    if hasattr(family, "tower_rule_of"):  # what a worker does since towers are told of grids
        media = replace(media, tower=family.tower_rule_of(folder)(grid_thw))
    parameters = list(model.model.visual.parameters())
    with Calls() as calls:
        family.image_features(model, media)
    print(calls.count, flush=True)
    for _ in sys.stdin:
        started = time.process_time()
        features = family.image_features(model, media).features
        torch.autograd.grad(features.square().sum(), parameters)
        print(time.process_time() - started, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
