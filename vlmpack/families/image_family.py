"""What families with images have in common: the marker, the token of a feature, the class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vlmpack.errors import ModelError
from vlmpack.families.base import ModulePaths

TOWER_AND_PROJECTOR = ModulePaths(
    vision="model.vision_tower",
    projectors=("model.multi_modal_projector",),
    language="model.language_model",
)


@dataclass(frozen=True, kw_only=True)
class ImageFamily:
    """Part of a family with images; see `vlmpack.families.Family`.

    Args:
        image_token: what one image feature replaces; the marker too, where no other is named.
        around: other tokens that the family writes for images.
        opening: the chat template's marker, where it is another token.
    """

    name: str
    model_types: tuple[str, ...]
    modules: ModulePaths = TOWER_AND_PROJECTOR
    num_position_axes: int = 1
    rule_version: int = 1
    pixel_knobs: tuple[str, ...] = ()
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
        return feature_token_id(tokenizer, self.image_token, *self.around)

    def auto_class(self) -> Any:
        """A whole vision-language model."""
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText


def feature_token_id(tokenizer: Any, token: str, *around: str) -> int:
    """The id of the token that an image feature replaces.

    Args:
        tokenizer: of transformers.
        token: the feature token.
        around: others that the family writes for images.

    Raises:
        ModelError: one of them is none of the tokenizer's special tokens.
    """
    missing = {token, *around} - tokenizer.get_added_vocab().keys()
    if missing:
        raise ModelError(
            f"model.path: the tokenizer has no special token {', '.join(sorted(missing))}, "
            f"which this family writes for images"
        )
    return int(tokenizer.convert_tokens_to_ids(token))
