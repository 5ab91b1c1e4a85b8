"""What families with images have in common: the marker, the token of a feature, the class, and that
their cost is a decoder's and a tower's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmpack.errors import ModelError
from vlmpack.families import flops
from vlmpack.families.base import Family, ModulePaths
from vlmpack.families.configs import whole_config
from vlmpack.families.tiles import stacked_tiles
from vlmpack.packing import CostModel, Media

TOWER_AND_PROJECTOR = ModulePaths(
    vision="model.vision_tower",
    projectors=("model.multi_modal_projector",),
    language="model.language_model",
)


@dataclass(frozen=True, kw_only=True)
class ImageFamily(Family):
    """A family with images; see `vlmpack.families.Family`.

    Args:
        image_token: the token that one image feature replaces. It is the marker too, unless
            `opening` names another.
        around: other tokens that the family writes around images.
        opening: the chat template's marker, where it is another token.
    """

    modules: ModulePaths = TOWER_AND_PROJECTOR
    image_token: str
    around: tuple[str, ...] = ()
    opening: str | None = None

    def marker(self, tokenizer: Any) -> str:
        """The token that opens an image, or the placeholder itself."""
        return self.opening or self.image_token

    def placeholder(self, tokenizer: Any) -> int:
        """The id of `image_token`.

        Raises:
            ModelError: a token of images is none of the tokenizer's special tokens.
        """
        missing = {self.image_token, *self.around} - tokenizer.get_added_vocab().keys()
        if missing:
            raise ModelError(
                f"model.path: the tokenizer has no special token {', '.join(sorted(missing))}, "
                f"which this family writes for images"
            )
        return int(tokenizer.convert_tokens_to_ids(self.image_token))

    def image_arguments(self, media: Media) -> dict[str, Any]:
        """All tiles of all images as one stack, where the family has tiles."""
        return {"pixel_values": stacked_tiles(media)}

    def auto_class(self) -> Any:
        """A whole vision-language model."""
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """The decoder's and the tower's; published files leave sizes out."""
        whole = whole_config(config)
        return flops.cost_model(whole, self.tower(whole))

    @abstractmethod
    def tower(self, config: Mapping[str, Any]) -> flops.Tower:
        """The shape of the vision tower and the projector, from the content of config.json.

        Raises:
            ModelError: a size is missing from it.
        """
