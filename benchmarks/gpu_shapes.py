"""Models with random weights in the shapes of published ones, and shards to train them on.

The tokenizer is the tiny models', so text costs about two tokens a word; the embedding has the
published model's rows, most of which no id reaches.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from models import ROOT
from PIL import Image

from vlmpack.model_folder.content import PROCESSOR_FILES

LINEAR_THRICE = ["linear_attention"] * 3 + ["full_attention"]
WORDS = ("where", "what", "left", "right", "above", "count", "the", "red", "chart", "says", "12")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model to measure and the rows to measure it on.

    Args:
        folder: whose tokenizer, processor and class are used.
        text: what its text_config has instead.
        vision: what its vision_config has instead; empty for a text model.
        max_tokens: slots of a planned row.
        sides: smallest and largest side of an image, in pixels.
        words: words of the shortest and the longest answer.
        max_pixels: of an image, after resizing.
    """

    folder: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    max_tokens: int
    sides: tuple[int, int]
    words: tuple[int, int]
    max_pixels: int


# What a machine without a GPU can run: it shows that the command works, and no speed.
TINY = Shape(
    folder="tiny-qwen2_5_vl",
    text={},
    vision={},
    max_tokens=1024,
    sides=(28, 112),
    words=(3, 60),
    max_pixels=12544,
)

SHAPES = {
    # Qwen2.5-VL-3B-Instruct's config.json: 3.75e9 parameters, embeddings tied.
    "qwen2_5_vl-3b": Shape(
        folder="tiny-qwen2_5_vl",
        text={
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "layer_types": ["full_attention"] * 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128000,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000000.0,
                "mrope_section": [16, 24, 24],
            },
            "vocab_size": 151936,
            "initializer_range": 0.02,
        },
        vision={
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "initializer_range": 0.02,
        },
        max_tokens=16384,
        sides=(224, 1400),
        words=(10, 900),
        max_pixels=1003520,
    ),
    # A hybrid of Qwen3.5's kind with about 2e9 parameters: three of four layers carry a state.
    "qwen3_5-2b": Shape(
        folder="tiny-qwen3_5",
        text={
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "layer_types": LINEAR_THRICE * 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "max_position_embeddings": 262144,
            "partial_rotary_factor": 0.25,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000,
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
            },
            "vocab_size": 248320,
            "initializer_range": 0.02,
        },
        vision={
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 2048,
            "patch_size": 16,
            "initializer_range": 0.02,
        },
        max_tokens=16384,
        sides=(224, 1400),
        words=(10, 900),
        max_pixels=1003520,
    ),
    # transformers' defaults for Gemma 4's text. Five of six layers have heads of 256 and a window,
    # one has heads of 512. There are no images.
    "gemma4-text": Shape(
        folder="gemma4_text",
        text={
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "sliding_window": 512,
            "vocab_size": 262144,
            "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256,
            "num_kv_shared_layers": 0,
        },
        vision={},
        max_tokens=8192,
        sides=(224, 1400),
        words=(10, 900),
        max_pixels=1003520,
    ),
    "tiny": TINY,
    "tiny-hybrid": replace(TINY, folder="tiny-qwen3_5", sides=(32, 128), max_pixels=16384),
    "tiny-gemma4": replace(TINY, folder="gemma4_text"),
}


def shaped_config(shape: Shape, source: Path | None = None) -> Any:
    """The configuration of transformers' class, from that of a folder, or of the assets."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source or ROOT / "assets" / shape.folder)
    if not hasattr(config, "vision_config"):
        return _changed(config, shape.text)
    for name, changes in (("text_config", shape.text), ("vision_config", shape.vision)):
        setattr(config, name, _changed(getattr(config, name), changes))
    return config


def _changed(config: Any, changes: Mapping[str, Any]) -> Any:
    # `per_layer_config` is derived from the others.
    known = {key: v for key, v in config.to_dict().items() if key != "per_layer_config"}
    return type(config)(**{**known, **changes})


def write_processor(shape: Shape, config: Any, source: Path, folder: Path) -> None:
    """Tokenizer and processor of a folder, for the model's patches and the shape's images."""
    for name in PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if not hasattr(config, "vision_config"):
        return
    processor = folder / "preprocessor_config.json"
    settings = json.loads(processor.read_text(encoding="utf-8"))
    settings["patch_size"] = config.vision_config.patch_size
    settings["size"]["longest_edge"] = shape.max_pixels
    processor.write_text(json.dumps(settings), encoding="utf-8")


def write_model(shape: Shape, folder: Path, device: torch.device) -> int:
    """A model folder with random bfloat16 weights; its number of parameters."""
    from transformers import AutoModelForImageTextToText

    source = ROOT / "assets" / shape.folder
    config = shaped_config(shape, source)
    torch.manual_seed(0)
    with device:
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    write_processor(shape, config, source, folder)
    return sum(parameter.numel() for parameter in model.parameters())


def write_shards(shape: Shape, folder: Path, *, samples: int, shards: int = 4) -> str:
    """Samples of all lengths, three of five with images; the glob of their shards."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    for shard in range(shards):
        with tarfile.open(folder / f"train-{shard}.tar", "w") as tar:
            for number in range(shard, samples, shards):
                for name, content in _sample(shape, draw, f"{number:06d}"):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    return str(folder / "train-*.tar")


def _sample(shape: Shape, draw: random.Random, key: str) -> list[tuple[str, bytes]]:
    """The files of one conversation."""
    images = draw.choice((0, 0, 1, 1, 2))
    short, long = shape.words
    words = round(short * (long / short) ** draw.random())  # most are short, some are long
    files: list[tuple[str, bytes]] = []
    question: list[dict[str, str]] = []
    for number in range(images):
        sides = (draw.randint(*shape.sides), draw.randint(*shape.sides))
        corner = Image.frombytes("RGB", (4, 4), draw.randbytes(48))
        stream = io.BytesIO()
        corner.resize(sides, Image.Resampling.BICUBIC).save(stream, "JPEG")
        files.append((f"{key}.{number}.jpg", stream.getvalue()))
        question.append({"type": "image", "image": f"{number}.jpg"})
    question.append({"type": "text", "text": "What is shown?"})
    answer = " ".join(draw.choice(WORDS) for _ in range(words))
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]
    return [*files, (f"{key}.json", json.dumps({"messages": messages}).encode())]
