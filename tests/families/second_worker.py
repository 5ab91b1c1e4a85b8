"""Run by the Python of `.references/second`, which has transformers 4.57: what its processors and
its classes' own positions make of conversations.

    python second_worker.py TORCHVISION FOLDER

FOLDER/cases.json has {"families": [{"family": name, "model": folder, "samples": [as the
cases of `support/video_worker.py`, with their keys]}], "configs": [model_type]};
FOLDER/pictures.safetensors has (H, W, 3) uint8 pictures by name. Writes for each family
FOLDER/<family>.safetensors with `<key>.<what the processor returns>`, and
FOLDER/configs/<model_type>/config.json of the defaults of each class.

    positions         (3, s) of the class's own `get_rope_index`
    positions_exact   the same with seconds that are not cut to whole numbers
    grid_as_read      of images, with the bounds that the Pillow class takes from its file

Nothing of vlmpack is imported here. Image processors are those on Pillow, videos are not sampled.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Family:
    """Names of classes of transformers.

    Args:
        processor, images, videos, tokenizer: what it is made of.
        model: whose `get_rope_index` counts positions; empty for 0, 1, 2 ...
        tokens: names by which the processor asks its tokenizer for tokens.
    """

    processor: str
    images: str
    videos: str = ""
    tokenizer: str = "PreTrainedTokenizerFast"
    model: str = ""
    tokens: dict[str, str] = field(default_factory=dict)


_QWEN2 = Family(
    "Qwen2VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", "Qwen2TokenizerFast",
    "qwen2_vl.Qwen2VLModel",
)  # fmt: skip
_QWEN3 = Family(
    "Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor", "Qwen2TokenizerFast",
    "qwen3_vl.Qwen3VLModel",
)  # fmt: skip
_PIXTRAL = Family("PixtralProcessor", "PixtralImageProcessor")
FAMILIES = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": Family(
        "Qwen2_5_VLProcessor", _QWEN2.images, _QWEN2.videos, _QWEN2.tokenizer,
        "qwen2_5_vl.Qwen2_5_VLModel",
    ),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "internvl": Family(
        "InternVLProcessor", "GotOcr2ImageProcessor", "InternVLVideoProcessor",
        tokens={
            "start_image_token": "<img>", "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>",
        },
    ),
    "llava_onevision": Family(
        "LlavaOnevisionProcessor", "LlavaOnevisionImageProcessor", "LlavaOnevisionVideoProcessor"
    ),
    "idefics3": Family("Idefics3Processor", "Idefics3ImageProcessor"),
    "smolvlm": Family("SmolVLMProcessor", "SmolVLMImageProcessor", "SmolVLMVideoProcessor"),
    "mistral3": _PIXTRAL,
    "llava": _PIXTRAL,
    "gemma3": Family(
        "Gemma3Processor", "Gemma3ImageProcessor",
        tokens={
            "image_token": "<image_soft_token>", "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    ),
}  # fmt: skip
"""Those with images; all others are texts, for any tokenizer."""


def read(path: Path) -> dict[str, Any]:
    """A JSON object; empty for a file that is not there."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def tokenizer_of(family: Family, folder: Path) -> Any:
    """From tokenizer.json, as version 4 has the rest of its settings."""
    import transformers

    settings = read(folder / "tokenizer_config.json")
    special = settings.get("extra_special_tokens") or []
    named = {name: settings[name] for name in ("eos_token", "pad_token") if settings.get(name)}
    tokenizer = getattr(transformers, family.tokenizer)(
        tokenizer_file=str(folder / "tokenizer.json"),
        additional_special_tokens=list(special.values() if isinstance(special, dict) else special),
        extra_special_tokens=family.tokens,
        clean_up_tokenization_spaces=False,
        **named,
    )
    tokenizer.chat_template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer


def processor_of(family: Family, folder: Path) -> Any:
    """The family's own, with the folder's settings."""
    import transformers

    settings = read(folder / "processor_config.json")
    config = read(folder / "config.json")
    given = {k: v for k, v in settings.items() if not k.endswith(("class", "processor"))}
    if "scale_factor" in config:  # Idefics3's folders say it themselves
        vision = config["vision_config"]
        side = vision["image_size"] // vision["patch_size"] // config["scale_factor"]
        given["image_seq_len"] = side**2
    parts = {"image_processor": family.images, "video_processor": family.videos}
    size = read(folder / "preprocessor_config.json")["size"]
    bounds = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
    read_by_name = family.images == "Qwen2VLImageProcessor"
    for name, kind in parts.items():
        if kind:
            more = name == "image_processor" and read_by_name
            said = {bounds[key]: value for key, value in size.items()} if more else {}
            given[name] = getattr(transformers, kind).from_pretrained(str(folder), **said)
    tokenizer = tokenizer_of(family, folder)
    return getattr(transformers, family.processor)(tokenizer=tokenizer, **given)


def features_of(processor: Any, case: dict[str, Any], pictures: dict[str, Any]) -> dict[str, Any]:
    """What the processor returns for one conversation."""
    from transformers.video_utils import VideoMetadata

    text = processor.tokenizer.apply_chat_template(case["messages"], tokenize=False)
    given: dict[str, Any] = {}
    if case["videos"]:
        given["videos"] = [
            torch.stack([pictures[name] for name in video["frames"]]).permute(0, 3, 1, 2)
            for video in case["videos"]
        ]
        given["video_metadata"] = [
            VideoMetadata(
                total_num_frames=len(video["frames"]),
                fps=video["fps"],
                frames_indices=list(video["at"]),
            )
            for video in case["videos"]
        ]
        given["do_sample_frames"] = False
        if case["rates"]:
            given["fps"] = case["rates"]
    if case["stills"]:
        given["images"] = [pictures[name].numpy() for name in case["stills"]]
        if case["nested"]:
            given["images"] = [given["images"]]
    if case["cut"]:
        given["crop_to_patches"] = True
    found = processor(text=[text], return_tensors="pt", **given)
    return {k: torch.as_tensor(v) for k, v in found.items() if isinstance(v, (torch.Tensor, list))}


class Uncut:
    """torch, whose `as_tensor` keeps the numbers that it is given."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def as_tensor(self, value: Any, **_: Any) -> torch.Tensor:
        return torch.as_tensor(value)


def positions_of(model: str, folder: Path, features: dict[str, Any], lib: Any) -> torch.Tensor:
    """(3, s) by the class's own `get_rope_index`, which needs its config alone."""
    from importlib import import_module

    module, name = model.split(".")
    code = import_module(f"transformers.models.{module}.modeling_{module}")
    counter = getattr(code, name)
    code.torch = lib  # type: ignore[attr-defined]
    config = read(folder / "config.json")
    vision = {"spatial_merge_size": 2, "tokens_per_second": 4} | config["vision_config"]
    own = SimpleNamespace(**{**config, "vision_config": SimpleNamespace(**vision)})
    names = ("image_grid_thw", "video_grid_thw")
    if module == "qwen2_5_vl":
        names += ("second_per_grid_ts",)
    given = {each: features[each] for each in names if each in features}
    if not given:
        return torch.arange(features["input_ids"].shape[1]).expand(3, -1)
    positions, _ = counter.get_rope_index(
        SimpleNamespace(config=own), features["input_ids"], **given
    )
    return positions[:, 0]


def main(where: Path, folder: Path) -> None:
    """Every family."""
    sys.path.insert(0, str(where))
    from support.torchvision_worker import declare

    alive = declare()
    import transformers

    assert transformers.__version__.startswith("4.57"), transformers.__version__
    transformers.logging.set_verbosity_error()
    from transformers.models.smolvlm import processing_smolvlm

    processing_smolvlm.num2words = str  # a package that its videos alone call
    pictures = load_file(str(folder / "pictures.safetensors"))
    wanted = json.loads((folder / "cases.json").read_text())
    for kind in wanted["configs"]:
        if kind in transformers.CONFIG_MAPPING:
            transformers.CONFIG_MAPPING[kind]().save_pretrained(str(folder / "configs" / kind))
    for one in wanted["families"]:
        family, model = FAMILIES.get(one["family"]), Path(one["model"])
        made: dict[str, torch.Tensor] = {}
        processor = None if family is None else processor_of(family, model)
        tokenizer = tokenizer_of(Family("", ""), model) if processor is None else None
        for case in one["samples"]:
            if tokenizer is not None:
                ids = tokenizer.apply_chat_template(case["messages"], tokenize=True)
                found = {"input_ids": torch.tensor([ids])}
            else:
                found = features_of(processor, case, pictures)
            if family is not None and family.model:
                found["positions_exact"] = positions_of(family.model, model, found, Uncut())
                found["positions"] = positions_of(family.model, model, found, torch)
                if case["stills"]:
                    own = getattr(transformers, family.images).from_pretrained(str(model))
                    stills = [pictures[name].numpy() for name in case["stills"]]
                    grids = own(images=stills, return_tensors="pt")["image_grid_thw"]
                    found["grid_as_read"] = grids
            made |= {f"{case['key']}.{k}": v.contiguous() for k, v in found.items()}
        save_file(made, str(folder / f"{one['family']}.safetensors"))
    del alive


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
