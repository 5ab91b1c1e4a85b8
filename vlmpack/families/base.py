"""What the shared code asks of a model family. No other code names a family.

Everything here runs on CPU without loading a model, in data workers too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from PIL.Image import Image
from torch import Tensor

from vlmpack.errors import CapabilityError
from vlmpack.families.coordinates import CoordinateRule
from vlmpack.packing import CostModel, EncodedSample, GridTHW, Media
from vlmpack.packing.batch import TowerRule
from vlmpack.recipe.data import ImagesSection


@dataclass(frozen=True, slots=True)
class Clip:
    """When the frames of a video were taken. `fps` is there where the data gives a rate."""

    times: tuple[float, ...]
    fps: float | None = None


NO_TOKEN = -1
"""An id that no token has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePaths:
    """Attribute paths inside the family's transformers model.

    Args:
        vision: the vision tower. None for a language model alone.
        projectors: modules or parameters that map the tower's width to the language model's, inside
            or outside `vision`.
        language: the decoder without the head; called with `inputs_embeds`.
        head: the module that makes logits, where the class's own `get_output_embeddings` does not
            know it, because it wraps a language model. Otherwise empty.
        deep_features: True where `Family.image_features` has deep ones too, one (M, D) tensor for
            each of the decoder's first layers. The decoder takes them as `deepstack_visual_embeds`,
            with `visual_pos_masks`.
        image_blocks: True where the tokens of an image's run attend to one another in both
            directions. The rule then sets `Media.blocks`.
        blocks_in_windows: True where they do so only in layers with a sliding window.
        untouched: what the class loads and no sample reaches (an audio tower). It stays unchanged,
            whatever is trained.
        whole: the model without its head, where its own forward pass runs on a whole row, ids and
            images together. None where the parts are called one by one.
    """

    vision: str | None
    projectors: tuple[str, ...]
    language: str
    head: str = ""
    deep_features: bool = False
    image_blocks: bool = False
    blocks_in_windows: bool = False
    untouched: tuple[str, ...] = ()
    whole: str | None = None

    def head_of(self, model: Any) -> Any:
        """The layer of the transformers model that makes logits."""
        return model.get_submodule(self.head) if self.head else model.get_output_embeddings()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """What an image of some size becomes.

    Args:
        grid: patches along (t, h, w). Their product is the image's cost in the tower. For families
            that cut images into tiles t counts tiles.
        text: replaces the template's marker in the conversation. It has the feature token once for
            each run, and the family's own tokens around them.
        runs: feature tokens of each run.
        seconds: of a video, between two patches along time; None for a still image.
    """

    grid: GridTHW
    text: str
    runs: tuple[int, ...]
    seconds: float | None = None

    @property
    def num_tokens(self) -> int:
        """Feature tokens of the image."""
        return sum(self.runs)


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """The outputs of the vision tower and the projector for all images of a batch, in order.

    Args:
        features: (M, D), projected; they replace the placeholders' embeddings.
        deep: (M, D) for each of the decoder's first layers, added to its output there (DeepStack);
            empty where the family has none.
    """

    features: Tensor
    deep: tuple[Tensor, ...] = ()


class ImageRule(Protocol):
    """How one family turns images into patches and placeholder tokens."""

    pictures_are_whole: ClassVar[bool]
    """Whether each of `pictures` is the whole image, resized: no padding, no crops beside it."""

    def layout(self, width: int, height: int, num_images: int = 1) -> ImageLayout:
        """Patches and tokens of an image of that size in pixels; no decoding.

        Args:
            num_images: images of the sample; LLaVA-OneVision shows a single image in more detail.

        Raises:
            ValueError: a size the family refuses (an extreme aspect ratio, say).
        """

    def preprocess(self, images: Sequence[Image]) -> Media:
        """Pixels of RGB images, in order, with their grids and token counts.

        Patches lie as rows, (P, channels * side * side), whatever the tower takes. So they can be
        counted, concatenated and divided without knowing the family.
        """

    def smallest(self) -> Media:
        """A blank image of the smallest size: keeps ranks without images in the collectives."""

    def settings(self) -> dict[str, Any]:
        """The keys of preprocessor_config.json that make transformers' own processor of the folder
        resize and cut images as this rule does; exported folders get them where a budget is set."""

    def pictures(self, media: Media) -> list[Image]:
        """The RGB images that `preprocess` made patches of: resized, normalisation undone."""


@runtime_checkable
class ShowsWhole(Protocol):
    """A rule that resizes a whole image, and so knows the size that the model sees."""

    def shown_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) in pixels of a resized image of that size.

        Raises:
            ValueError: as `ImageRule.layout`.
        """


class VideoRule(Protocol):
    """How one family turns the frames of a video into patches and placeholder tokens."""

    def layout(self, width: int, height: int, clip: Clip) -> ImageLayout:
        """Patches and tokens of a video from the size of its frames; no decoding.

        Raises:
            ValueError: a size, a number of frames or times that the family refuses.
        """

    def preprocess(self, frames: Sequence[Image], clip: Clip) -> Media:
        """Pixels of a video's RGB frames, which have one size, as one item of `Media`."""


@dataclass(frozen=True, kw_only=True)
class Family(ABC):
    """One model family, said once; as it is here, of a decoder that counts 0, 1, 2 ..."""

    name: str
    model_types: tuple[str, ...]
    """`model_type` values of config.json that this family serves."""
    modules: ModulePaths
    num_position_axes: int = 1
    """1, or 3 where positions are MRoPE (temporal, height, width)."""
    rule_version: int = 1
    """Raise it when a length or a position changes: it enters the fingerprint of lengths."""
    pixel_knobs: tuple[str, ...] = ()
    """Fields of `ImagesSection` that the family has; the encoder refuses the others."""
    proven_by_verify: bool = False
    """True where nobody wrote the family down: a model trains only where `verify` passed on it."""
    needs_fixed_cache: bool = False
    """True where `generate` asks the class for masks with a cache of a fixed size alone, and those
    that its forward makes otherwise are another model's."""
    video_token: str = ""
    """What the chat template writes for a video, which is the token that one of its features
    replaces too, unless frames are as images; empty where the family takes none."""
    video_wrapped: str = ""
    """That token with what the template writes around it, where it is all replaced; else empty."""
    frames_as_images: bool = False
    """Whether features of videos replace the token of images: to the model each frame is one."""
    frames_apart: bool = False
    """Whether each patch along a video's time counts positions as an image: text is in between."""
    coordinates: CoordinateRule | None = None
    """How it writes boxes and points; None where no publisher says."""
    largest_head: int = 0
    """Channels of the decoder's widest attention head; 0 where all kernels have as many."""

    def configured(self, config: Mapping[str, Any]) -> Family:
        """The family as one config.json has it, where that decides more than sizes.

        Raises:
            CapabilityError: a model of the family that cannot be trained.
        """
        return self

    def logit_cap(self, config: Mapping[str, Any]) -> float | None:
        """c where the class bends its logits z to c tanh(z / c); None where it leaves them."""
        return None

    def decoder_arguments(
        self, model: Any, input_ids: Tensor, media_positions: Tensor
    ) -> dict[str, Any]:
        """The decoder's arguments besides embeddings, positions and boundaries.

        Args:
            input_ids: (B, S) int64.
            media_positions: (M,) int64, the placeholders among the flattened slots.
        """
        return {}

    @abstractmethod
    def marker(self, tokenizer: Any) -> str:
        """The text that the chat template writes for an image. Empty without a tower."""

    @abstractmethod
    def placeholder(self, tokenizer: Any) -> int:
        """Id of the token that one image feature replaces; NO_TOKEN without a tower."""

    @abstractmethod
    def image_rule(self, folder: Path, budget: ImagesSection) -> ImageRule | None:
        """The rule for the processor files of a model folder; None without a tower.

        Args:
            budget: a bound of None leaves the processor's own; bounds outside `pixel_knobs` are
                None.

        Raises:
            ValueError: the processor is another one.
            CapabilityError: a bound that this processor cannot keep.
        """

    def video_rule(self, folder: Path, settings: Mapping[str, Any]) -> VideoRule | None:
        """The rule for videos of a model folder; None where the family takes none.

        Args:
            settings: those of its image rule, where a budget is set, because videos may use its
                file too.

        Raises:
            OSError, ValueError: the video processor is another one.
        """
        return None

    def video_placeholder(self, tokenizer: Any) -> int:
        """Id of the token that a feature of a video replaces; NO_TOKEN where it is that of images,
        or where there is none."""
        if (
            not self.video_token
            or self.frames_as_images
            or self.video_token not in tokenizer.get_added_vocab()
        ):
            return NO_TOKEN
        return int(tokenizer.convert_tokens_to_ids(self.video_token))

    @abstractmethod
    def image_arguments(self, media: Media) -> dict[str, Any]:
        """Images and videos in the spelling of the transformers class: what its forward and, of
        images, its `get_image_features` take, on the device of the pixels."""

    def token_arguments(self, is_image: Tensor) -> dict[str, Tensor]:
        """The arguments of the transformers class's forward that describe its ids.

        Args:
            is_image: (B, S), nonzero on placeholders. It is bool, or int64 where the family takes
                videos, with 1 for images and 2 for videos.
        """
        return {}

    def class_arguments(
        self, model: Any, arguments: dict[str, Any], *, generates: bool = False
    ) -> dict[str, Any]:
        """Change the arguments of the transformers class's forward where the family differs from
        all others.

        Otherwise its answers would be those of another model.

        Args:
            arguments: those of some samples, on its device; `attention_mask` is (B, S), 1 on
                tokens.
            generates: whether they are for `generate`.
        """
        return arguments

    @abstractmethod
    def image_features(self, model: Any, media: Media) -> ImageFeatures:
        """Tower and projector on all images of a batch, in one call.

        Args:
            media: pixels in the tower's dtype and on its device.
        """

    def tower_rule(self, vision: Mapping[str, Any]) -> TowerRule | None:
        """Grids -> `Media.tower`, for the workers that make rows; None where the tower makes it
        itself.

        `vision` is `vision_config` of config.json, the class's defaults filled in.
        """
        return None

    def tower_rule_of(self, folder: Path) -> TowerRule | None:
        """`tower_rule` of a model folder.

        Raises:
            ModelError: config.json is none of the family's.
        """
        return None

    def tower_modules(self) -> tuple[str, ...]:
        """Modules of the transformers model that make image features, next to one another.

        It is the vision tower alone where its projector is part of it.
        """
        return () if self.modules.vision is None else (self.modules.vision,)

    def tower_features(self, tower: Any, media: Media) -> ImageFeatures:
        """`image_features` by the tower alone, because the mcore engine has only that of the
        transformers model.

        Args:
            tower: the module at `modules.vision`. If there are several `tower_modules`, a module
                that has them in the same places.

        Raises:
            CapabilityError: the family has not said where its projector is.
        """
        raise CapabilityError(f"the projector of {self.name} is no part of its vision tower")

    @abstractmethod
    def auto_class(self) -> Any:
        """The Auto class of transformers that loads the model with its head."""

    def positions(
        self,
        num_tokens: int,
        media_starts: Sequence[int],
        media: Sequence[GridTHW],
        seconds: Sequence[float | None] = (),
    ) -> Tensor:
        """(A, s) int64 positions of one sample; image tokens count as text does.

        Args:
            media_starts: index of each image's first placeholder.
            seconds: time between a video's patches, and None for a still image; empty where all are
                still.
        """
        return torch.arange(num_tokens)[None]

    @abstractmethod
    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """FLOPs of a training step by tokens and patches.

        Raises:
            ModelError: a size is missing from it.
        """


def kinds_of(ids: Tensor, placeholder_id: int, video_id: int = NO_TOKEN) -> Tensor:
    """Which ids are placeholders, as `Family.token_arguments` takes it."""
    is_image = ids == placeholder_id
    return is_image if video_id == NO_TOKEN else is_image + 2 * (ids == video_id)


def stock_arguments(
    family: Family, sample: EncodedSample, *, placeholder_id: int, video_id: int = NO_TOKEN
) -> dict[str, Any]:
    """One sample as the family's transformers class takes it, unpacked.

    It has `input_ids` and `attention_mask`, (1, s), and what the family's images need.
    """
    ids = sample.input_ids[None]
    images = family.image_arguments(sample.media) if sample.media is not None else {}
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        **family.token_arguments(kinds_of(ids, placeholder_id, video_id)),
        **images,
    }


def positions_of(
    family: Family, num_tokens: int, media_positions: Sequence[int], media: Media | None
) -> Tensor:
    """(A, s) int64 positions of one sample, by its family's rule.

    Args:
        media: its images and videos; pixels are not read.
    """
    if media is None:
        return family.positions(num_tokens, [], ())
    starts: list[int] = []
    grids: list[GridTHW] = []
    seconds: list[float | None] = []
    place = 0
    of_videos = media.seconds or [None] * media.num_images
    for grid, count, step in zip(media.grid_thw, media.num_tokens, of_videos, strict=True):
        t, h, w = grid
        pieces = t if step is not None and family.frames_apart else 1
        for _ in range(pieces):
            starts.append(media_positions[place])
            grids.append(grid if pieces == 1 else (1, h, w))
            place += count // pieces
        seconds += [step] * pieces
    if media.seconds is None:
        return family.positions(num_tokens, starts, grids)
    return family.positions(num_tokens, starts, grids, seconds)
