"""Run with torchvision on the path: what transformers' image processors there make of pictures.

    python torchvision_worker.py TORCHVISION FOLDER

FOLDER/cases.json lists (class, settings), FOLDER/pictures.safetensors has (H, W, 3) uint8 pictures.
Writes FOLDER/<number of the case>.safetensors: the features of each picture alone.

torchvision has no wheel for a CPU build of torch; one for CUDA can be imported beside it where its
operators are declared, which no image processor calls. It never enters an environment where
pixels of a run are made.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ON_BOTH = {
    "Qwen2VLImageProcessor": "qwen2_vl",
    "PixtralImageProcessor": "pixtral",
    "Idefics3ImageProcessor": "idefics3",
}
"""Classes of which transformers has one on PIL too, `...Pil`; and their folders."""
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, "
    "int pooled_width, int sampling_ratio, bool aligned) -> Tensor",
)


def declare() -> Any:
    """Make torchvision importable; what is returned has to stay alive."""
    library = torch.library.Library("torchvision", "DEF")
    for operator in OPERATORS:
        library.define(operator)
    sys.modules["torchvision._meta_registrations"] = ModuleType("nothing")
    return library


def main(where: Path, folder: Path) -> None:
    """Every case."""
    sys.path.insert(0, str(where))
    alive = declare()
    from support.played_torchvision import CLASSES  # transformers looks for torchvision once

    pictures = load_file(str(folder / "pictures.safetensors"))
    for number, (name, settings) in enumerate(json.loads((folder / "cases.json").read_text())):
        model = (CLASSES | ON_BOTH)[name]
        module = import_module(f"transformers.models.{model}.image_processing_{model}")
        processor = getattr(module, name)(**settings)
        made = {}
        for key, picture in pictures.items():
            features = processor(images=[picture.numpy()], return_tensors="pt")
            made |= {
                f"{key}.{part}": torch.as_tensor(value).contiguous()
                for part, value in features.items()
            }
        save_file(made, str(folder / f"{number}.safetensors"))
    del alive


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
