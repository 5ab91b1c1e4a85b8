"""Any model of transformers that no family of ours serves, with images or without: what a family
says is asked of its class.

    parts of the model      get_decoder, get_encoder("image")
    an image's text         the processor's replace_image_token           (generic_images)
    its pixels              the processor's image processor, on PIL
    placeholder             image_token_id of config.json
    positions               get_rope_index, or 0, 1, 2 ...
    the forward pass        the class's own, on the whole row (backends/hf/model)

Nothing of this is guaranteed, so such a model trains only where `verify` has passed on it.

The class is inspected on a model on the meta device, which takes no memory whatever its size.
Modules that belong to neither language model nor tower are the projectors.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmpack.capabilities.folder import read_config
from vlmpack.capabilities.refused import LAYER_KINDS, LOGITS_CAP, Kind, kind_of
from vlmpack.errors import CapabilityError, ModelError, schema_error
from vlmpack.families import flops
from vlmpack.families.base import Family, ImageFeatures, ModulePaths
from vlmpack.families.coordinates import GENERIC
from vlmpack.families.generic_images import GenericImageRule, generic_image_rule, open_processor
from vlmpack.families.text_lm import TextLM
from vlmpack.model_folder.load import build_model, config_of
from vlmpack.packing import CostModel, GridTHW, Media
from vlmpack.recipe.data import ImagesSection

UNUSED = ("audio", "generation", "vqmodel")
"""Parts of the names of modules that no image on its way to text passes."""

TOWER_OUTPUTS = ("last_hidden_state", "hidden_states", "attentions")
"""What a tower returns of its own layers, beside or instead of features."""


@dataclass(frozen=True)
class Skeleton:
    """A model on the meta device, and where its parts are."""

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
        counters = [part for part in self.model.modules() if hasattr(part, "get_rope_index")]
        return counters[-1] if counters else None

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
    """FLOPs of a training step, as in `flops`.

    They count the weights that a token and a patch pass through, and attention over every pair of
    tokens in layers that have it.

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
    """c if a class bends its logits z to c tanh(z / c), by the words of its own forward pass.

    None if its config has no such entry, or its forward pass does not name it.
    """
    cap = getattr(model.config.get_text_config(), LOGITS_CAP, None)
    named = LOGITS_CAP in inspect.getsource(inspect.unwrap(type(model).forward))
    return float(cap) if cap is not None and named else None


def skeleton(folder: Path, auto_class: Any) -> Skeleton:
    """The skeleton of a model folder; made once for each config.json.

    Raises:
        ModelError: transformers builds no model of it.
        CapabilityError: its parts cannot be identified.
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
    others = [
        f"{whole}.{name}" if whole else name
        for name, part in (*model.base_model.named_children(), *_parameters(model.base_model))
        if isinstance(part, torch.nn.Parameter) or any(True for _ in part.parameters())
    ]
    others = [
        path
        for path in others
        if not any(f"{one}.".startswith(f"{path}.") for one in taken) and path != "lm_head"
    ]
    unused = tuple(path for path in others if any(part in path for part in UNUSED))
    return ModulePaths(
        vision=vision,
        projectors=tuple(path for path in others if path not in unused),
        language=language,
        untouched=unused,
        whole=whole,
    )


def _parameters(module: Any) -> list[tuple[str, Any]]:
    return list(module.named_parameters(recurse=False))


PLACEHOLDER_KEYS = ("image_token_id", "image_token_index")
"""Where a config.json says which token one image feature replaces."""

KINDS = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
"""Arguments of a forward pass that say which tokens are an image's."""

START_KEYS = ("vision_start_token_id", "image_start_token_id")


@dataclass(frozen=True, kw_only=True)
class GenericVLM(Family):
    """A class with images; see `vlmpack.families.Family`."""

    folder: Path
    proven_by_verify: bool = True

    @cached_property
    def skeleton(self) -> Skeleton:
        """Its class, without weights."""
        return skeleton(self.folder, self.auto_class())

    def marker(self, tokenizer: Any) -> str:
        """The processor's `image_token`."""
        token = getattr(open_processor(self.folder), "image_token", None)
        token = getattr(token, "content", token)  # an AddedToken
        if not isinstance(token, str):
            raise CapabilityError(
                f"model.path: the processor of {self.folder} names no image_token, so nobody knows "
                f"what its chat template writes for an image"
            )
        return token

    def placeholder(self, tokenizer: Any) -> int:
        """What config.json names.

        Raises:
            CapabilityError: it names none.
        """
        config = read_config(self.folder)
        ids = (config.get(key) for key in PLACEHOLDER_KEYS)
        token = next((value for value in ids if isinstance(value, int)), None)
        token = token if token is not None else self._default_placeholder()
        if token is None:
            raise CapabilityError(
                f"model.path: config.json of {self.folder} names no "
                f"{' or '.join(PLACEHOLDER_KEYS)}, so nobody knows which tokens image "
                f"features replace"
            )
        return token

    def _default_placeholder(self) -> int | None:
        config = self.skeleton.model.config
        ids = (getattr(config, key, None) for key in PLACEHOLDER_KEYS)
        return next((value for value in ids if isinstance(value, int)), None)

    def image_rule(self, folder: Path, budget: ImagesSection) -> GenericImageRule:
        """The processor's own; a budget is refused before."""
        processor = open_processor(folder)
        placeholder = self.placeholder(processor.tokenizer)
        try:
            token = processor.tokenizer.convert_ids_to_tokens(placeholder)
        except (OverflowError, TypeError, ValueError):
            token = None
        if not isinstance(token, str):
            raise CapabilityError(
                f"model.path: config.json of {folder} says image_token_id: {placeholder}, and its "
                "tokenizer has no token of that id. Expected the one that its processor writes"
            )
        return generic_image_rule(folder, token)

    @cached_property
    def rule(self) -> GenericImageRule:
        """That of the folder."""
        return self.image_rule(self.folder, ImagesSection())

    def image_arguments(self, media: Media) -> dict[str, Any]:
        """What the processor makes of the images, as far as the class's forward names it."""
        takes = self.skeleton.takes()
        return _named_as(takes, self.rule.arguments(media))

    def token_arguments(self, is_image: Tensor) -> dict[str, Tensor]:
        """1 on placeholders, under whichever name the class's forward has for it."""
        takes = self.skeleton.takes()
        return {name: is_image.int() for name in KINDS if name in takes}

    def image_features(self, model: Any, media: Media) -> ImageFeatures:
        """By the class's `get_image_features`: all that it returns, as one matrix.

        Raises:
            CapabilityError: the class has none.
        """
        maker = self.skeleton.feature_maker
        if maker is None:
            raise CapabilityError(
                f"{type(model).__name__} has no get_image_features, by which an image passes the "
                f"tower of a row that has none"
            )
        place = next(n for n, part in self.skeleton.model.named_modules() if part is maker)
        function = model.get_submodule(place).get_image_features
        takes = inspect.signature(function).parameters
        given = _named_as(takes, self.rule.arguments(media))
        return ImageFeatures(_all_features(function(**given)))

    def auto_class(self) -> Any:
        """A whole vision-language model."""
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText

    def positions(
        self,
        num_tokens: int,
        media_starts: Sequence[int],
        media: Sequence[GridTHW],
        seconds: Sequence[float | None] = (),
    ) -> Tensor:
        """Those of the class's own `get_rope_index`; 0, 1, 2 ... where it has none."""
        counter = self.skeleton.counter
        if counter is None:
            return torch.arange(num_tokens)[None]
        config = read_config(self.folder)
        placeholder = self.placeholder(None)
        starts = (config.get(key) for key in START_KEYS)
        start = next((token for token in starts if isinstance(token, int)), None)
        ids = torch.full((1, num_tokens), _other_than(placeholder, start))
        for at, grid in zip(media_starts, media, strict=True):
            count = self.rule.tokens_of_grid(grid)
            ids[0, at : at + count] = placeholder
            if start is not None and at:
                ids[0, at - 1] = start
        is_image = ids == placeholder
        given: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "image_grid_thw": torch.tensor(list(media)) if media else None,
            **{name: is_image.int() for name in KINDS},
        }
        takes = inspect.signature(counter.get_rope_index).parameters
        try:
            counted, _ = counter.get_rope_index(**{n: v for n, v in given.items() if n in takes})
        except (RuntimeError, StopIteration, TypeError) as error:
            raise schema_error(
                f"get_rope_index of {type(counter).__name__} counts no positions for its "
                f"{len(media)} images in {num_tokens} tokens: {error}; expected text between images"
            ) from error
        positions: Tensor = counted[:, 0].long()
        return positions

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """See `generic_model.cost_of`."""
        return cost_of(self.skeleton)

    def logit_cap(self, config: Mapping[str, Any]) -> float | None:
        """See `generic_model.bent_logits`."""
        return bent_logits(self.skeleton.model)


@dataclass(frozen=True, kw_only=True)
class GenericLM(TextLM):
    """A language model alone; see `vlmpack.families.Family`.

    Args:
        kind: the kind that transformers registers. Mistral 4 is registered with images, which its
            class does not take.
    """

    folder: Path
    kind: Kind = "text"
    proven_by_verify: bool = True

    @cached_property
    def skeleton(self) -> Skeleton:
        """Its class, without weights."""
        return skeleton(self.folder, self.auto_class())

    def auto_class(self) -> Any:
        """A decoder with its head."""
        if self.kind == "text":
            return super().auto_class()
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """See `generic_model.cost_of`."""
        return cost_of(self.skeleton)

    def logit_cap(self, config: Mapping[str, Any]) -> float | None:
        """See `generic_model.bent_logits`."""
        return bent_logits(self.skeleton.model)


def _named_as(takes: Container[str], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a function takes of these; Video-LLaVA's processor has `pixel_values_images` where its
    class has `pixel_values`."""
    named = {n if n in takes else n.removesuffix("_images"): value for n, value in inputs.items()}
    return {name: value for name, value in named.items() if name in takes}


def _other_than(*tokens: int | None) -> int:
    """An id that is none of these."""
    return next(token for token in range(len(tokens) + 1) if token not in tokens)


def _all_features(output: Any) -> Tensor:
    """(M, D) of whatever `get_image_features` returns, for its gradient alone."""
    features = getattr(output, "pooler_output", None)
    if features is None and isinstance(output, Mapping):
        features = [output[name] for name in output if name not in TOWER_OUTPUTS]
    parts = _tensors(output if features is None else features)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _tensors(of: Any) -> Iterator[Tensor]:
    """Those in lists of lists, which in Granite 4 Vision have numbers of layers too."""
    if isinstance(of, Tensor):
        yield of
    elif isinstance(of, list | tuple):
        for one in of:
            yield from _tensors(one)


def generic_family(folder: Path, model_type: str) -> Family:
    """The family of a model folder whose model_type no family of ours serves.

    Raises:
        ModelError, CapabilityError: transformers has no class for it that says what is asked.
    """
    kind = kind_of(model_type)
    if kind is None:
        raise ModelError(f"model.path: transformers registers no class for {model_type!r}")
    shared: dict[str, Any] = {
        "name": f"generic ({model_type})",
        "model_types": (model_type,),
        "coordinates": GENERIC.get(model_type),
        "folder": folder,
    }
    if kind == "image-text-to-text":
        whole = GenericVLM(modules=ModulePaths(vision="", projectors=(), language=""), **shared)
        paths = whole.skeleton.paths
        if paths.vision is not None:
            axes = 1 if whole.skeleton.counter is None else whole.skeleton.num_axes
            return replace(whole, modules=paths, num_position_axes=axes)
    nobody = ModulePaths(vision=None, projectors=(), language="")
    alone = GenericLM(modules=nobody, kind=kind, **shared)
    return replace(alone, modules=alone.skeleton.paths)
