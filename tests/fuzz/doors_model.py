"""Doors of a model folder and of a checkpoint: configs, templates, tokenizers, manifests."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import templates
from support.fake_tokenizer import FakeTokenizer
from support.fuzz import Door, changed, damaged, json_bytes
from support.shards import TINY_MODEL

from vlmpack.capabilities.folder import read_config, served_model_type
from vlmpack.encode import Encoder
from vlmpack.encode.chat import ChatEncoder
from vlmpack.encode.sample import Message, TextPart
from vlmpack.families.configs import whole_config
from vlmpack.families.registry import family_of
from vlmpack.model_folder.content import config_content, generation_content, processor_content
from vlmpack.model_folder.weights import weight_files
from vlmpack.training.checkpoint.folders import (
    complete_text,
    data_state_of,
    find_damage,
    newest_checkpoint,
    saved_data_state,
)
from vlmpack.training.checkpoint.safetensors_file import FileDigest

Go = Callable[[random.Random], object]
TALK = tuple(
    Message(role, (TextPart(text),))
    for role, text in [("user", "What is it?"), ("assistant", "A cat."), ("user", "And this?")]
)


def _template(_: Path) -> Go:
    good = [
        value.text.encode()
        for value in vars(templates).values()
        if isinstance(value, templates.Template)
    ]

    def go(draw: random.Random) -> None:
        text = damaged(draw.choice(good), draw, good).decode("utf-8", "replace")
        ChatEncoder(FakeTokenizer(text), takes_images=False).render(TALK)

    # The damage alone is what is refused.
    for text in good:
        ChatEncoder(FakeTokenizer(text.decode()), takes_images=False)

    return go


def _folder(root: Path, *names: str) -> Path:
    """A copy of the tiny model's folder, of its small files alone."""
    folder = root / "model"
    folder.mkdir(exist_ok=True)
    for file in TINY_MODEL.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder / file.name)
    return folder


def _damaged_json(good: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.4:
        return damaged(good, draw, [good])
    return json_bytes(changed(json.loads(good), draw))


def _config(root: Path) -> Go:
    folder = _folder(root)
    good = (folder / "config.json").read_bytes()

    def go(draw: random.Random) -> None:
        (folder / "config.json").write_bytes(_damaged_json(good, draw))
        config_content(folder)
        served_model_type(folder)
        family_of(folder)
        if draw.random() < 0.2:
            whole_config(read_config(folder))

    return go


def _small_files(root: Path) -> Go:
    folder = _folder(root)
    names = ("generation_config.json", "preprocessor_config.json", "tokenizer_config.json")
    good = {name: (folder / name).read_bytes() for name in names}
    index = {
        "metadata": {"total_size": 4},
        "weight_map": {"a": "x.safetensors", "b": "x.safetensors"},
    }
    (folder / "x.safetensors").write_bytes(b"")

    def go(draw: random.Random) -> None:
        name = draw.choice(names)
        (folder / name).write_bytes(_damaged_json(good[name], draw))
        listing = folder / "model.safetensors.index.json"
        listing.write_bytes(_damaged_json(json_bytes(index), draw))
        generation_content(folder)
        processor_content(folder, {}, {})
        weight_files(folder)

    return go


def _encoder(root: Path) -> Go:
    """The whole of it: config, tokenizer, template and image processor are loaded."""
    folder = _folder(root)
    names = [file.name for file in folder.iterdir()]
    good = {name: (folder / name).read_bytes() for name in names}

    def go(draw: random.Random) -> None:
        name = draw.choice([*names, "tokenizer.json", "tokenizer.json"])
        whole = good[name]
        is_json = name.endswith(".json")
        bad = _damaged_json(whole, draw) if is_json else damaged(whole, draw, [whole])
        try:
            (folder / name).write_bytes(bad)
            encoder = Encoder(folder)
            encoder.load()
            assert encoder.fingerprint
            encoder.chat.encode(TALK)
        finally:
            (folder / name).write_bytes(whole)

    return go


def _checkpoint(root: Path) -> Go:
    """Checkpoints whose chain of digests was made anew over what is wrong."""
    from hashlib import sha256

    folder = root / "step-00000003"
    folder.mkdir()
    index = {
        kind: {
            "w": {
                "shape": [2],
                "dtype": "F32",
                "boxes": [{"file": "a.safetensors", "key": "k", "start": [0], "stop": [2]}],
            }
        }
        for kind in ("parameter", "exp_avg", "exp_avg_sq")
    }
    state = {"vlmpack_format": 1, "totals": {"data_state": "{}", "step": 3}}
    values = {"index.json": index, "state.json": state, "random.safetensors": {}}

    def go(draw: random.Random) -> None:
        files = {name: json_bytes(value) for name, value in values.items()}
        name = draw.choice([*files, "manifest.json", "COMPLETE"])
        if name in files:
            files[name] = _damaged_json(files[name], draw)
        listed: Any = {
            "files": {
                file: {"bytes": len(data), "sha256": sha256(data).hexdigest()}
                for file, data in files.items()
            }
        }
        manifest = json_bytes(listed)
        if name == "manifest.json":
            manifest = _damaged_json(manifest, draw)
        digest = FileDigest(num_bytes=len(manifest), sha256=sha256(manifest).hexdigest())
        complete = complete_text(3, digest).encode()
        if name == "COMPLETE":
            complete = damaged(complete, draw, [complete])
        for file, data in {**files, "manifest.json": manifest, "COMPLETE": complete}.items():
            (folder / file).write_bytes(data)
        find_damage(folder)
        newest_checkpoint(root)
        saved_data_state(root)
        data_state_of(folder)

    return go


DOORS = [
    Door("template", 1, _template),
    Door("config.json", 1, _config),
    Door("small files of a model", 1, _small_files),
    Door("encoder of a model", 0.02, _encoder),
    Door("checkpoint", 1, _checkpoint),
]
