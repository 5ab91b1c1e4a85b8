"""Quantised folders of the tiny model, made by the packages whose formats they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.shards import TINY_MODEL
from torch import Tensor

BITSANDBYTES = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
WORDS: dict[str, dict[str, Any]] = {
    "words of 4": {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32},
    "words of 8": {"num_bits": 8, "symmetric": True, "strategy": "channel"},
}
BLOCK = 64


def make(kind: str, folder: Path) -> Path:
    """A folder of one of the kinds: `BITSANDBYTES`, `WORDS` and `fp8`."""
    if kind in BITSANDBYTES:
        return _of_bitsandbytes(BITSANDBYTES[kind], folder)
    shutil.copytree(TINY_MODEL, folder)
    (file,) = folder.glob("*.safetensors")
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(file).items():
        value = value.bfloat16()
        if not name.endswith("_proj.weight") or "visual" in name:
            tensors[name] = value
        elif kind == "fp8":
            tensors |= _blocks(name, value)
        else:
            tensors |= _words(name.removesuffix("weight"), value, WORDS[kind])
    save_file(tensors, file, metadata={"format": "pt"})
    section: dict[str, Any] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", "model.visual"],
    }
    if kind != "fp8":
        group = {"targets": ["Linear"], "weights": {"type": "int", **WORDS[kind]}}
        section = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", "re:.*visual.*"],
        }
    _say(folder, section)
    return folder


def _say(folder: Path, section: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": section, "dtype": "bfloat16"}
    path.write_text(json.dumps(config))


def _of_bitsandbytes(settings: dict[str, Any], folder: Path) -> Path:
    from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

    model = AutoModelForImageTextToText.from_pretrained(
        TINY_MODEL, quantization_config=BitsAndBytesConfig(**settings), dtype=torch.bfloat16
    )
    shutil.copytree(TINY_MODEL, folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    model.save_pretrained(folder)
    return folder


def _blocks(name: str, weight: Tensor) -> dict[str, Tensor]:
    rows, columns = (size // BLOCK for size in weight.shape)
    cut = weight.float().view(rows, BLOCK, columns, BLOCK)
    scales = cut.abs().amax((1, 3)) / 448
    codes = (cut / scales[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scales}


def _words(layer: str, weight: Tensor, settings: dict[str, Any]) -> dict[str, Tensor]:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    size = settings.get("group_size", weight.shape[1])
    groups = weight.float().view(weight.shape[0], -1, size)
    low, high = groups.amin(2), groups.amax(2)
    half = 2 ** (settings["num_bits"] - 1)
    state = {"weight": weight}
    if settings["symmetric"]:
        state["weight_scale"] = (groups.abs().amax(2) / (half - 1)).bfloat16()
    else:
        scales = ((high - low) / (2 * half - 1)).bfloat16()
        zeros = (-half - low / scales).round().clamp(-half, half - 1)
        state |= {"weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**settings))
    packed = PackedQuantizationCompressor.compress(state, scheme)
    return {layer + name: value.contiguous() for name, value in packed.items()}


def their_dense(kind: str, folder: Path) -> Any:
    """The model as transformers loads and dequantises it, then in float32."""
    from transformers import AutoModelForImageTextToText

    load = AutoModelForImageTextToText.from_pretrained
    if kind in BITSANDBYTES:
        dtype = torch.float32 if kind == "int8" else torch.bfloat16
        return load(folder, dtype=dtype).dequantize().float()
    from transformers import CompressedTensorsConfig, FineGrainedFP8Config

    asked: Any = FineGrainedFP8Config if kind == "fp8" else CompressedTensorsConfig
    model = load(folder, quantization_config=asked(dequantize=True), dtype=torch.bfloat16)
    return model.float()
