"""Run with torchvision on the path: what transformers' own processor makes of conversations with
images and videos.

    python video_worker.py TORCHVISION FOLDER

FOLDER/cases.json lists {"model": folder, "messages": [...], "stills": [name], "videos":
[{"frames": [name], "fps": number, "at": [number]}]}; FOLDER/pictures.safetensors (H, W, 3) uint8
pictures by name. Writes FOLDER/<number of the case>.safetensors: all that the processor returns.

Frames are taken as they are (do_sample_frames=False). Still images go through the processor's image
backend on Pillow, as everywhere in vlmpack; videos have torchvision's alone.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.torchvision_worker import declare


@cache
def processor_of(folder: str) -> Any:
    """That of a model folder."""
    from transformers import AutoImageProcessor, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    processor.image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return processor


def features_of(case: dict[str, Any], pictures: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the processor of a case's model folder returns for it."""
    from transformers.video_utils import VideoMetadata

    processor = processor_of(case["model"])
    text = processor.apply_chat_template(case["messages"], tokenize=False)
    if type(processor).__name__ == "Qwen3VLProcessor":
        # By 5.17 it leaves these around the times; up to 5.8 it took them away (docs/video.md).
        text = text.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
    videos = [
        torch.stack([pictures[name] for name in video["frames"]]).permute(0, 3, 1, 2)
        for video in case["videos"]
    ]
    metadata = [
        VideoMetadata(
            total_num_frames=len(video["frames"]),
            fps=video["fps"],
            frames_indices=list(video["at"]),
        )
        for video in case["videos"]
    ]
    given: dict[str, Any] = {}
    if videos:
        given = {"videos": videos, "video_metadata": metadata, "do_sample_frames": False}
    stills = [pictures[name].numpy() for name in case["stills"]]
    features = processor(text=[text], images=stills or None, return_tensors="pt", **given)
    return {
        name: torch.as_tensor(value).contiguous()
        for name, value in features.items()
        if name != "video_metadata"
    }


def main(where: Path, folder: Path) -> None:
    """Every case."""
    sys.path.insert(0, str(where))
    alive = declare()
    pictures = load_file(str(folder / "pictures.safetensors"))
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        save_file(features_of(case, pictures), str(folder / f"{number}.safetensors"))
    del alive


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
