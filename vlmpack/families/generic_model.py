"""What a class of transformers says of its own parts, asked of a model without weights.

config.json -> the class on the meta device (no memory, whatever the size)
get_decoder()               the language model
get_encoder("image")        the vision tower
what lies beside the two    the projectors
get_rope_index              positions, where the class counts them itself
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vlmpack.capabilities.folder import read_config
from vlmpack.capabilities.refused import LAYER_KINDS, LOGITS_CAP
from vlmpack.errors import CapabilityError, ModelError
from vlmpack.families import flops
from vlmpack.families.base import ModulePaths
from vlmpack.model_folder.load import build_model, config_of
from vlmpack.packing import CostModel

UNUSED = ("audio", "generation", "vqmodel")
"""Parts of the names of modules that no image on its way to text passes."""


@dataclass(frozen=True)
class Skeleton:
    """A model on the meta device, and where its parts are.

    Args:
        model: of transformers' class, with its head.
        paths: of its parts.
    """

    model: Any
    paths: ModulePaths

    @property
    def whole(self) -> Any:
        """The model without its head: what maps ids and images to hidden states."""
        assert self.paths.whole is not None
        return self.model.get_submodule(self.paths.whole)

    @property
    def counter(self) -> Any | None:
        """The module that counts positions, where the class has one."""
        found = [part for part in self.model.modules() if hasattr(part, "get_rope_index")]
        return found[-1] if found else None

    @property
    def feature_maker(self) -> Any | None:
        """The module with `get_image_features`; None where the class has none."""
        makers = [part for part in (self.model, self.whole) if hasattr(part, "get_image_features")]
        return makers[-1] if makers else None

    @property
    def num_axes(self) -> int:
        """Axes that positions have: three (temporal, height, width), or as many as the class's
        rotary sections, where there are more."""
        rope = getattr(self.model.config.get_text_config(), "rope_parameters", None) or {}
        sections = rope.get("mrope_section") if isinstance(rope, Mapping) else None
        return max(3, len(sections or ()))

    def takes(self) -> Mapping[str, inspect.Parameter]:
        """The arguments that the forward pass without the head names."""
        return inspect.signature(self.whole.forward).parameters

    def size(self, path: str) -> int:
        """Weights of the matrices of a part; of experts those that a token chooses."""
        total = 0.0
        text = self.model.config.get_text_config()
        chosen = getattr(text, "num_experts_per_tok", None)
        for name, parameter in self.model.get_submodule(path).named_parameters():
            if parameter.ndim < 2 or "embed_tokens" in name:
                continue
            share = chosen / parameter.shape[0] if chosen and parameter.ndim == 3 else 1.0
            total += parameter.numel() * min(1.0, share)
        return int(total)


def cost_of(whole: Skeleton) -> CostModel:
    """FLOPs of a training step by the weights that a token and a patch pass through, and of
    attention over every pair of tokens in layers that have it, as in `flops`.

    Raises:
        ModelError: config.json has no hidden_size or no vocab_size.
    """
    text = whole.model.config.get_text_config().to_dict()
    width, paths = flops.size(text, "hidden_size"), whole.paths
    heads = text.get("num_attention_heads") or 0  # none in Mamba-2
    inner = heads * (text.get("head_dim") or width // max(heads, 1))
    kinds = next((text[key] for key in LAYER_KINDS if isinstance(text.get(key), list)), None)
    layers = text.get("num_hidden_layers") or 0
    if kinds is not None:
        layers = sum("attention" in str(kind) and "linear" not in str(kind) for kind in kinds)
    tower = whole.size(paths.vision) if paths.vision is not None else 0
    return CostModel(
        per_token=flops.STEP * 2.0 * whole.size(paths.language),
        per_squared_length=flops.STEP * 2.0 * layers * inner,
        per_label_token=flops.STEP * 2.0 * width * flops.size(text, "vocab_size"),
        per_patch=flops.STEP * 2.0 * tower,
    )


def bent_logits(model: Any) -> float | None:
    """c where a class bends its logits z to c tanh(z / c), by the words of its own forward pass;
    None where its config has no such entry, or its forward does not name it."""
    cap = getattr(model.config.get_text_config(), LOGITS_CAP, None)
    named = LOGITS_CAP in inspect.getsource(inspect.unwrap(type(model).forward))
    return float(cap) if cap is not None and named else None


def skeleton(folder: Path, auto_class: Any) -> Skeleton:
    """The skeleton of a model folder; made once for each config.json.

    Args:
        folder: model folder.
        auto_class: the Auto class of transformers that loads it.

    Raises:
        ModelError: transformers builds no model of it.
        CapabilityError: its parts cannot be told.
    """
    return _skeleton(json.dumps(read_config(folder), sort_keys=True), auto_class)


@cache
def _skeleton(config: str, auto_class: Any) -> Skeleton:
    try:
        with torch.device("meta"):
            model = build_model(auto_class, config_of(json.loads(config)))
    except Exception as error:  # a config may be wrong anywhere in a model's class
        raise ModelError(
            f"config.json: transformers builds no model of it: {type(error).__name__}: {error}"
        ) from error
    return Skeleton(model, paths_of(model))


def paths_of(model: Any) -> ModulePaths:
    """Where a transformers model keeps its parts, by its own word.

    Raises:
        CapabilityError: it does not say, or its parts are not side by side.
    """
    names = {id(part): name for name, part in model.named_modules()}
    kind = type(model).__name__
    decoder = model.get_decoder()
    while model is not decoder and hasattr(decoder, "lm_head"):
        decoder = decoder.get_decoder()
    language, whole = names.get(id(decoder), ""), names.get(id(model.base_model), "")
    if not language:
        raise CapabilityError(f"{kind} names no language model (get_decoder)")
    encoder = model.get_encoder("image")
    vision = names.get(id(encoder), "")
    if decoder is model.base_model:  # a language model alone
        return ModulePaths(vision=None, projectors=(), language=language, whole=language)
    if encoder is decoder or not vision or vision == whole:
        raise CapabilityError(f"{kind} names no vision tower (get_encoder('image'))")
    taken = (language, vision)
    beside = [
        f"{whole}.{name}" if whole else name
        for name, part in (*model.base_model.named_children(), *_parameters(model.base_model))
        if isinstance(part, torch.nn.Parameter) or any(True for _ in part.parameters())
    ]
    beside = [
        path
        for path in beside
        if not any(f"{one}.".startswith(f"{path}.") for one in taken) and path != "lm_head"
    ]
    unused = tuple(path for path in beside if any(part in path for part in UNUSED))
    return ModulePaths(
        vision=vision,
        projectors=tuple(path for path in beside if path not in unused),
        language=language,
        untouched=unused,
        whole=whole,
    )


def _parameters(module: Any) -> list[tuple[str, Any]]:
    return list(module.named_parameters(recurse=False))
