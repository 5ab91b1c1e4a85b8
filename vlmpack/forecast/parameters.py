"""A model's sizes from the files of its folder: headers of safetensors files and config.json, or,
where the weights are not there, config.json and the class that it names, without storage.

No weight is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmpack.capabilities.prediction import is_prediction
from vlmpack.errors import ModelError
from vlmpack.families.configs import whole_config
from vlmpack.forecast.layers import LayerSizes, decoder_layers
from vlmpack.model_folder.safetensors_read import tensors_of
from vlmpack.model_folder.weights import weight_files
from vlmpack.whole_file import read_json

_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSizes:
    """The vision tower: blocks, their width, MLP width, whether the MLP has a gate, and whether one
    matrix makes queries, keys and values, which then lie in one tensor."""

    blocks: int
    width: int
    intermediate: int
    gated: bool
    fused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What memory depends on.

    Args:
        tower, embedding, head: parameters outside the decoder layers; an audio tower counts with
            the vision tower, the head's are 0 where it shares the embedding.
        layers: parameters of all decoder layers that every expert-parallel rank holds, matrices.
        vectors: those of the layers that are no matrices (norms, biases), and the final norm.
        experts: parameters of all experts of all layers.
        largest_block: of one decoder layer or vision block.
        outside: parameters in no layer or block: embedding, head, final norm, of the tower what
            makes patches and the projector.
        hidden: the decoder's width.
        decoder: its layers, one by one.
        vocabulary: rows of the head.
        vision: the tower; None without one.
        files: that said so.
    """

    tower: int
    embedding: int
    head: int
    layers: int
    vectors: int
    experts: int
    largest_block: int
    outside: int
    hidden: int
    decoder: tuple[LayerSizes, ...]
    vocabulary: int
    vision: TowerSizes | None
    files: str

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        dense = self.tower + self.embedding + self.head
        return dense + self.layers + self.vectors + self.experts

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.decoder)


class UnknownSizesError(ModelError):
    """Neither config.json nor the names of tensors say what the estimate needs."""


def read_sizes(folder: Path) -> ModelSizes | None:
    """The sizes of a model folder; None where it has no safetensors file.

    Raises:
        ModelError: a file that is none or is missing.
        UnknownSizesError: a config.json without the sizes of a decoder.
    """
    if next(folder.glob("*.safetensors"), None) is None:
        return None
    paths = weight_files(folder)  # not all there are: some folders hold the weights twice
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        shapes.update(read_shapes(path))
    return _of_folder(shapes, folder, f"{len(paths)} safetensors header{'s'[: len(paths) > 1]}")


def built_sizes(auto_class: Any, folder: Path) -> ModelSizes:
    """The sizes of a model whose weights are not there, as transformers builds it from config.json,
    without storage.

    Args:
        auto_class: that builds it.
        folder: with config.json; an index of weights, or files that it lists, are not looked at.

    Raises:
        UnknownSizesError: a config.json that transformers cannot build, or that lacks the sizes of
            a decoder.
    """
    from vlmpack.backends.skeleton import model_skeleton

    try:
        model = model_skeleton(auto_class, folder)
    except ModelError as error:
        raise UnknownSizesError(f"{error}; memory cannot be estimated") from error
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return _of_folder(shapes, folder, "config.json, as transformers builds it")


def _of_folder(shapes: Mapping[str, tuple[int, ...]], folder: Path, files: str) -> ModelSizes:
    config = read_json(folder / "config.json")
    if "model_type" in config:
        config = whole_config(config)
    try:
        return _sizes(shapes, config, files)
    except (KeyError, TypeError) as error:
        raise UnknownSizesError(
            f"model.path: {folder / 'config.json'} does not say {error}, so memory cannot be "
            "estimated"
        ) from error


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a safetensors file's tensors.

    Raises:
        ModelError: a file that cannot be read, or is no safetensors file.
    """
    try:
        return {tensor.name: tensor.shape for tensor in tensors_of(path, whole=False)}
    except ValueError as error:
        raise ModelError(f"model.path: {error}") from error


def _sizes(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], files: str
) -> ModelSizes:
    groups = dict.fromkeys(("tower", "embedding", "head", "layers", "vectors", "experts"), 0)
    blocks: dict[str, int] = {}
    held = {name: shape for name, shape in shapes.items() if not is_prediction(name, config)}
    for name, shape in held.items():
        count = math.prod(shape)
        groups[_group(name, shape)] += count
        block = re.match(r"(.*\b(?:layers|blocks)\.\d+)\.", name)
        if block is not None:
            blocks[block[1]] = blocks.get(block[1], 0) + count
    text: Mapping[str, Any] = config.get("text_config") or config
    language = {name: shape for name, shape in held.items() if _group(name, shape) != "tower"}
    return ModelSizes(
        **groups,
        largest_block=max(blocks.values(), default=0),
        outside=sum(groups.values()) - sum(blocks.values()),
        hidden=text["hidden_size"],
        decoder=decoder_layers(language, text),
        vocabulary=text["vocab_size"],
        vision=_tower(config.get("vision_config"), held) if groups["tower"] else None,
        files=files,
    )


def _group(name: str, shape: tuple[int, ...]) -> str:
    if re.search(r"(^|\.)(visual|vision_tower|vision_model|audio_tower)\.", name):
        return "tower"
    if "embed_tokens" in name or name.endswith(".embeddings.weight"):
        return "embedding"
    if "lm_head" in name:
        return "head"
    if ".experts." in name:
        return "experts"
    return "layers" if len(shape) > 1 and _LAYER.search(name) else "vectors"


def _tower(
    vision: Mapping[str, Any] | None, shapes: Mapping[str, tuple[int, ...]]
) -> TowerSizes | None:
    if vision is None:
        return None
    # Qwen2-VL calls the width embed_dim, and its hidden_size is the language model's.
    width = vision.get("embed_dim") or vision["hidden_size"]
    return TowerSizes(
        blocks=vision.get("depth") or vision["num_hidden_layers"],
        width=width,
        intermediate=vision.get("intermediate_size")
        or vision.get("mlp_dim")
        or int(width * vision["mlp_ratio"]),
        gated=vision.get("hidden_act") == "silu",
        fused=any(name.endswith(".attn.qkv.weight") for name in shapes),
    )
