"""What an image may cost: the recipe's `images`."""

from __future__ import annotations

from pydantic import Field

from vlmpack.recipe.sources import Section


class ImagesSection(Section):
    """Bounds on the size that images are resized to, in place of the processor's own. What is not
    set stays as the model folder says; which of them a model has depends on its family."""

    min_pixels: int | None = Field(default=None, ge=1, examples=[3136])
    """Smallest area of a resized image, width x height in pixels: smaller ones are enlarged."""

    max_pixels: int | None = Field(default=None, ge=1, examples=[1003520])
    """Largest area of a resized image, width x height in pixels: larger ones are shrunk. The cap
    on image files is `data.max_image_pixels`."""

    max_tiles: int | None = Field(default=None, ge=1, examples=[4])
    """Most tiles that an image is cut into, for families that cut images into tiles of one size."""

    def set_values(self) -> dict[str, int]:
        """The bounds that are set, by name."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if value is not None}
