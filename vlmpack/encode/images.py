"""The images of a sample: sizes of all, pixels of those that this process encodes.

A process alone decodes all of them. Of a replica's processes each decodes its own
(`packing.image_owners`) and reads the headers of the others, from which the text follows. An image
that nobody else opens is a fault that nobody else sees, so such an error says which image it is
about: of a sample with several, the processes then name the one that a process alone would meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from PIL import Image

from vlmpack.encode.decode import decode_image, size_of, which_image
from vlmpack.errors import DataError
from vlmpack.families.base import ImageLayout, ImageRule
from vlmpack.packing import Media
from vlmpack.packing.image_owners import ImageOwners, SampleShare

Size = tuple[int, int]
"""(width, height) in pixels."""
Sizes = Sequence[Size]


@dataclass(frozen=True, slots=True)
class SampleImages:
    """The images of a sample, opened.

    Args:
        sizes: (width, height) of each.
        own: those that this process makes pixels of, decoded.
        owners: of each; None where this process makes all.
    """

    sizes: tuple[Size, ...]
    own: tuple[Image.Image, ...]
    owners: ImageOwners | None = None

    def media(self, rule: ImageRule, layouts: Sequence[ImageLayout]) -> Media | None:
        """Pixels; None for no images.

        Args:
            rule: of the family.
            layouts: what each image becomes.
        """
        if self.owners is None:
            return rule.preprocess(self.own) if self.own else None
        if not self.sizes:
            return None
        blank = rule.smallest()
        if self.own:
            rows = rule.preprocess(self.own).pixel_values
        else:
            rows = torch.empty(0, blank.pixel_values.shape[1])
        return Media(
            pixel_values=rows,
            grid_thw=tuple(layout.grid for layout in layouts),
            num_tokens=tuple(layout.num_tokens for layout in layouts),
            image_sizes=None if blank.image_sizes is None else self.sizes,
            blocks=None if blank.blocks is None else tuple(layout.runs for layout in layouts),
            owners=self.owners,
        )


def open_images(
    files: Sequence[bytes],
    names: Sequence[str],
    sizes: Sizes | None = None,
    share: SampleShare | None = None,
    *,
    rule: ImageRule | None,
    max_pixels: int,
) -> SampleImages:
    """The images of a sample, one after the other: of a share, the headers of the others', so that
    what is wrong with an image is met in the same order.

    Args:
        files: encoded, in token order.
        names: of the images, for messages.
        sizes: (width, height) to resize each to, where the plan shrank them.
        share: whose images this process decodes; None for all.
        rule: of the family; None for no images.
        max_pixels: as of `decode_image`.

    Raises:
        DataError: as `decode_image`, with its `image` where there is a share; (integrity) a header
            that lies.
    """
    if rule is None or share is None:
        own = [
            decode_image(data, which_image(n, names), max_pixels=max_pixels)
            for n, data in enumerate(files)
        ]
        if sizes is not None:
            own = [_resized(image, size) for image, size in zip(own, sizes, strict=True)]
        return SampleImages(tuple(image.size for image in own), tuple(own))
    seen: list[Size] = []
    mine: list[Image.Image] = []
    counts: list[int] = []
    for number, data in enumerate(files):
        which = which_image(number, names)
        try:
            size = sizes[number] if sizes else size_of(data, which, max_pixels=max_pixels)
            counts.append(_patches(rule, size, len(files)))
            if share.owner(sum(counts[:-1]), counts[-1]) == share.row.rank:
                image = decode_image(data, which, max_pixels=max_pixels)
                if not sizes and image.size != size:
                    raise DataError(
                        f"image {which} is {image.width} x {image.height} pixels, its header says "
                        f"{size[0]} x {size[1]}",
                        error_class="integrity",
                    )
                mine.append(_resized(image, size))
        except DataError as error:
            error.image = number
            raise
        seen.append(size)
    return SampleImages(tuple(seen), tuple(mine), share.owners(counts))


def layouts_of(rule: ImageRule, sizes: Sizes, names: Sequence[str]) -> list[ImageLayout]:
    """What the images of a sample become.

    Args:
        rule: of the family.
        sizes: (width, height) in pixels of all of its images.
        names: of the images, for messages.

    Raises:
        DataError: (decode) a size that the family refuses.
    """
    found = []
    for place, size in enumerate(sizes):
        try:
            found.append(rule.layout(*size, num_images=len(sizes)))
        except ValueError as error:
            reason = f"image {which_image(place, names)}: {error}"
            raise DataError(reason, error_class="decode") from error
    return found


def _patches(rule: ImageRule, size: Size, count: int) -> int:
    """What an image costs; nothing where the family refuses its size, which is told afterwards."""
    try:
        return prod(rule.layout(*size, num_images=count).grid)
    except ValueError:
        return 0


def _resized(image: Image.Image, size: Size) -> Image.Image:
    same = image.size == tuple(size)
    return image if same else image.resize(size, Image.Resampling.BICUBIC)
