"""Any model of transformers that no family of ours serves, with images or without: what a family
says is asked of its class.

    parts of the model      get_decoder, get_encoder("image")             (generic_model)
    an image's text         the processor's replace_image_token           (generic_images)
    its pixels              the processor's image processor, on PIL
    placeholder             image_token_id of config.json
    positions               get_rope_index, or 0, 1, 2 ...
    the forward pass        the class's own, on the whole row (backends/hf/whole_model)

Nothing of this is a promise: such a model trains only where `verify` has passed on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmpack.capabilities.folder import read_config
from vlmpack.capabilities.registered import Kind, kind_of
from vlmpack.errors import CapabilityError, ModelError, schema_error
from vlmpack.families.base import Family, ImageFeatures, ModulePaths
from vlmpack.families.generic_images import GenericImageRule, generic_image_rule, open_processor
from vlmpack.families.generic_model import Skeleton, bent_logits, cost_of, skeleton
from vlmpack.families.text_lm import TextLM
from vlmpack.packing import CostModel, GridTHW, Media
from vlmpack.recipe.data import ImagesSection

PLACEHOLDER_KEYS = ("image_token_id", "image_token_index")
"""Where a config.json says which token one image feature replaces."""

KINDS = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
"""Arguments by which a forward pass is told which tokens are an image's."""

START_KEYS = ("vision_start_token_id", "image_start_token_id")


@dataclass(frozen=True, kw_only=True)
class GenericVLM(Family):
    """A class with images; see `vlmpack.families.Family`.

    Args:
        folder: the model folder whose class it is.
    """

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
        found = (config.get(key) for key in PLACEHOLDER_KEYS)
        token = next((value for value in found if isinstance(value, int)), None)
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
        found = (getattr(config, key, None) for key in PLACEHOLDER_KEYS)
        return next((value for value in found if isinstance(value, int)), None)

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
                "tokenizer has no such token; expected the one that its processor writes"
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
            found, _ = counter.get_rope_index(**{n: v for n, v in given.items() if n in takes})
        except (RuntimeError, StopIteration, TypeError) as error:
            raise schema_error(
                f"get_rope_index of {type(counter).__name__} counts no positions for its "
                f"{len(media)} images in {num_tokens} tokens: {error}; expected text between images"
            ) from error
        positions: Tensor = found[:, 0].long()
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
        folder: the model folder whose class it is.
        kind: what transformers registers it as: Mistral 4 is registered with images that its class
            does not take.
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


def _named_as(takes: Container[str], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a function takes of these; Video-LLaVA's processor has `pixel_values_images` where its
    class has `pixel_values`."""
    named = {n if n in takes else n.removesuffix("_images"): value for n, value in found.items()}
    return {name: value for name, value in named.items() if name in takes}


def _other_than(*tokens: int | None) -> int:
    """An id that is none of these."""
    return next(token for token in range(len(tokens) + 1) if token not in tokens)


def _all_features(output: Any) -> Tensor:
    """(M, D) of whatever `get_image_features` returns, for its gradient alone."""
    found = getattr(output, "pooler_output", None)
    found = output if found is None else found
    parts = [found] if isinstance(found, Tensor) else list(found)
    flat = [part for one in parts for part in ([one] if isinstance(one, Tensor) else one)]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in flat])


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
