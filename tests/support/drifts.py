"""Ways in which what lies in a model folder may differ from what a run was trained from."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TOWER, NORM = "visual.blocks.0.attn.qkv.weight", "model.norm.weight"

Tensors = dict[str, Tensor]


def weights(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    """Change the tensors of a folder's one file, which is replaced."""

    def drift(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(str(path))
        change(tensors)
        path.unlink()
        save_file(tensors, str(path), metadata={"format": "pt"})

    return drift


def said(name: str, *keys: str, value: Any) -> Callable[[Path], None]:
    """Put a value into a JSON file, under keys one inside the other."""

    def drift(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        place = content
        for key in keys[:-1]:
            place = place[key]
        assert place.get(keys[-1]) != value
        place[keys[-1]] = value
        (folder / name).write_text(json.dumps(content))

    return drift


def _new_tower(tensors: Tensors) -> None:
    generator = torch.Generator().manual_seed(5)
    for name, value in tensors.items():
        if name.startswith("visual."):
            value += 0.01 * torch.randn(value.shape, generator=generator).to(value.dtype)


def _one_value(tensors: Tensors) -> None:
    tensors[TOWER][0, 0] += 1


def _other_bytes(folder: Path) -> None:
    """Written into the file in place, of the same size, its times put back."""
    path = folder / "model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        last = file.read(64)
        file.seek(-64, os.SEEK_END)
        file.write(bytes(byte ^ 1 for byte in last))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert after.st_ino == before.st_ino


def _other_merges(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    merges = content["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    path.write_text(json.dumps(content))


def _added_token(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    last = max(content["added_tokens"], key=lambda token: token["id"])
    content["added_tokens"].append(last | {"id": last["id"] + 1, "content": "<|new|>"})
    path.write_text(json.dumps(content))


def _template(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text() + "{# changed #}")


def reshard(folder: Path) -> None:
    """The same tensors in two files: no drift."""
    tensors = load_file(str(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    names, listed = sorted(tensors), {}
    for number, part in enumerate((names[1::2], names[::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        listed |= dict.fromkeys(part, file)
        held = {name: tensors[name] for name in part}
        save_file(held, str(folder / file), metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def touch(folder: Path) -> None:
    """The same bytes at another time, under another inode: no drift."""
    path = folder / "model.safetensors"
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)
    os.utime(path, (time.time(), time.time() - 100))


DRIFTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another tower": (weights(_new_tower), "weight visual."),
    "one value of one tensor": (weights(_one_value), f"weight {TOWER}: "),
    "other bytes, size and mtime the same": (_other_bytes, "weight "),
    "a tensor of another dtype": (
        weights(lambda t: t.update({NORM: t[NORM].double()})),
        f"weight {NORM}: ",
    ),
    "a tensor left out": (weights(lambda t: t.pop(TOWER)), f"weight {TOWER}: "),
    "rms_norm_eps": (
        said("config.json", "text_config", "rms_norm_eps", value=0.01),
        "config.json: text_config.rms_norm_eps: ",
    ),
    "rope_theta": (
        said("config.json", "text_config", "rope_parameters", "rope_theta", value=123.0),
        "config.json: text_config.rope_parameters.rope_theta: ",
    ),
    "the vision tower's config": (
        said("config.json", "vision_config", "hidden_act", value="gelu"),
        "config.json: vision_config.hidden_act: ",
    ),
    "the config's dtype": (said("config.json", "dtype", value="float16"), "config.json: dtype: "),
    "the vocabulary's merges": (_other_merges, "tokenizer.json: model: "),
    "an added token": (_added_token, "tokenizer.json: added token '<|new|>': missing in the run"),
    "the tokenizer's settings": (
        said("tokenizer_config.json", "clean_up_tokenization_spaces", value=True),
        "tokenizer_config.json: clean_up_tokenization_spaces: ",
    ),
    "the chat template": (_template, "chat_template.jinja: "),
    "the image processor": (
        said("preprocessor_config.json", "image_mean", value=[0.5, 0.5, 0.5]),
        "preprocessor_config.json: image_mean: ",
    ),
}
"""What is done to the folder, and what a refusal must name."""
