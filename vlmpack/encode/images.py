"""The images of a sample: sizes of all, and pixels of those that this process encodes. A video is
one item with one image file for each frame.

A single process decodes all of them. Of a replica's processes each decodes its own
(`packing.image_owners`) and reads only the headers of the others, from which the text follows. Only
the owner can find a fault in an image's pixels, so such an error names the image. Of several
errors, the processes then report the one that a single process would meet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from vlmpack.encode.decode import decode_image, size_of, which_image
from vlmpack.encode.sample import Shown, VideoPart
from vlmpack.errors import CapabilityError, DataError, ModelError, schema_error
from vlmpack.families.base import Clip, Family, ImageLayout, ImageRule, VideoRule
from vlmpack.limits import MAX_CLIP_PIXELS
from vlmpack.packing import Media
from vlmpack.packing.batch import ImageOwners
from vlmpack.packing.image_owners import SampleOwners, select_images
from vlmpack.packing.media import concatenate_media
from vlmpack.recipe.data import ImagesSection
from vlmpack.whole_file import read_json

_FILES = (("preprocessor_config.json", None), ("processor_config.json", "image_processor"))
"""Where transformers looks for an image processor: a file, or a section of one."""


def refuse_budget(budget: ImagesSection, family: Family, folder: Path) -> None:
    """Refuses bounds that a family's images do not have.

    Raises:
        CapabilityError: with the knobs that there are.
    """
    has = family.pixel_knobs
    for name, value in budget.set_values().items():
        if name in has:
            continue
        if family.modules.vision is None:
            what = "has no vision tower, so images have no budget; leave it out"
        elif not has:
            what = f"is of family {family.name}, whose images have no bounds; leave it out"
        else:
            knobs = " and ".join(f"images.{knob}" for knob in has)
            what = f"is of family {family.name}, which has {knobs}"
        raise CapabilityError(f"images.{name}: {value}, but the model in {folder} {what}")


def write_bounds(settings: Mapping[str, Any], folder: Path) -> None:
    """Puts bounds into the processor files of an exported folder."""
    for name, section in _FILES:
        path = folder / name
        if not path.is_file():
            continue
        content: dict[str, Any] = read_json(path)
        if section is not None and section not in content:
            continue
        (content if section is None else content[section]).update(settings)
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class Rules(NamedTuple):
    """How a family turns pixels into patches."""

    images: ImageRule
    videos: VideoRule | None = None


def image_rule_of(family: Family, folder: Path, budget: ImagesSection) -> ImageRule:
    """The family's rule with a folder's sizes, or the budget's."""
    refuse_budget(budget, family, folder)
    try:
        rule = family.image_rule(folder, budget)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path: {folder} has no usable image processor "
            f"(preprocessor_config.json): {error}"
        ) from error
    if rule is None:
        raise CapabilityError(f"model.path: the model in {folder} has no vision tower")
    return rule


def video_rule_of(
    family: Family, folder: Path, images: ImageRule, budget: ImagesSection
) -> VideoRule | None:
    """The family's rule for videos; None where it takes none.

    Raises:
        CapabilityError: the folder's video processor is none that the family's rule follows.
    """
    settings = images.settings() if budget.set_values() else {}
    try:
        return family.video_rule(folder, settings)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CapabilityError(
            f"model.path: the data has videos, and the video processor of {folder} (a section of "
            f"processor_config.json, video_preprocessor_config.json or, without them, "
            f"preprocessor_config.json) is none that can be followed: {error}"
        ) from error


Size = tuple[int, int]
"""(width, height) in pixels."""
Sizes = Sequence[Size]


class Item(NamedTuple):
    """A still image, or a video."""

    files: slice
    clip: Clip | None = None


def items_of(num_files: int, shown: Sequence[Shown] = ()) -> list[Item]:
    """What the image files of a sample are."""
    if not any(isinstance(part, VideoPart) for part in shown):
        return [Item(slice(n, n + 1)) for n in range(num_files)]
    items: list[Item] = []
    place = 0
    for part in shown:
        clip = Clip(part.times, part.fps) if isinstance(part, VideoPart) else None
        end = place + (1 if clip is None else len(clip.times))
        items.append(Item(slice(place, end), clip))
        place = end
    return items


@dataclass(frozen=True, slots=True)
class SampleImages:
    """The images of a sample, opened.

    Args:
        sizes: (width, height) of each file.
        own: the decoded frames of each item that this process makes pixels of.
        clips: the clip of each own item; None for a still image.
        owners: the owner of each item; None where this process makes all.
    """

    sizes: tuple[Size, ...]
    items: tuple[Item, ...]
    own: tuple[tuple[Image.Image, ...], ...]
    clips: tuple[Clip | None, ...]
    owners: ImageOwners | None = None

    def media(self, rules: Rules, layouts: Sequence[ImageLayout]) -> Media | None:
        """Pixels; None for no images."""
        if self.owners is None:
            return self._made(rules) if self.own else None
        if not self.sizes:
            return None
        blank = rules.images.smallest()
        if self.own:
            rows = self._made(rules).pixel_values
        else:
            rows = torch.empty(0, blank.pixel_values.shape[1])
        return Media(
            pixel_values=rows,
            grid_thw=tuple(layout.grid for layout in layouts),
            num_tokens=tuple(layout.num_tokens for layout in layouts),
            image_sizes=None if blank.image_sizes is None else self._item_sizes,
            blocks=None if blank.blocks is None else tuple(layout.runs for layout in layouts),
            seconds=seconds_of(layouts),
            owners=self.owners,
        )

    @property
    def _item_sizes(self) -> tuple[Size, ...]:
        """(width, height) of each item: the frames of a video have one size."""
        return tuple(self.sizes[item.files.start] for item in self.items)

    def _made(self, rules: Rules) -> Media:
        """Still images in one call, as far as they lie together."""
        made: list[Media] = []
        still: list[Image.Image] = []
        for frames, clip in zip(self.own, self.clips, strict=True):
            if clip is None:
                still += frames
                continue
            if still:
                made.append(self._stills(rules.images, still))
                still = []
            assert rules.videos is not None
            video = rules.videos.preprocess(frames, clip)
            step = rules.videos.layout(*frames[0].size, clip).seconds
            made.append(replace(video, seconds=(step,)))
        if still:
            made.append(self._stills(rules.images, still))
        return made[0] if len(made) == 1 else concatenate_media(made)

    def _stills(self, rule: ImageRule, images: Sequence[Image.Image]) -> Media:
        """Their pixels. A sample's only image may be shown in more detail, so one image of several
        is made beside another."""
        if len(images) == 1 < len(self.items):
            alone, among = (rule.layout(*images[0].size, num) for num in (1, len(self.items)))
            if alone != among:
                made = select_images(rule.preprocess([*images] * 2), [0])
                assert made is not None
                return made
        return rule.preprocess(images)


def seconds_of(layouts: Sequence[ImageLayout]) -> tuple[float | None, ...] | None:
    """`Media.seconds` of items."""
    seconds = tuple(layout.seconds for layout in layouts)
    return None if all(each is None for each in seconds) else seconds


def open_images(
    files: Sequence[bytes],
    names: Sequence[str],
    sizes: Sizes | None = None,
    owners: SampleOwners | None = None,
    *,
    rules: Rules | None,
    max_pixels: int,
    shown: Sequence[Shown] = (),
) -> SampleImages:
    """Open the images of a sample in order.

    Of images that other processes own, only headers are read, so every process meets errors in the
    same order.

    Args:
        sizes: (width, height) to resize each image to, where the plan shrank them.
        owners: who owns which image; None if this process decodes all.

    Raises:
        DataError: as `decode_image`, with its `image` where there are owners; (integrity) a header
            that lies.
    """
    items = items_of(len(files), shown)
    if rules is None or owners is None:
        own = [
            decode_image(data, which_image(n, names), max_pixels=max_pixels)
            for n, data in enumerate(files)
        ]
        if sizes is not None:
            own = [_resized(image, size) for image, size in zip(own, sizes, strict=True)]
        return SampleImages(
            tuple(image.size for image in own),
            tuple(items),
            tuple(tuple(own[item.files]) for item in items),
            tuple(item.clip for item in items),
        )
    # `layouts_of` reports a frame whose size differs from that of its video's others.
    seen: list[Size] = []
    mine: list[tuple[Image.Image, ...]] = []
    clips: list[Clip | None] = []
    counts: list[int] = []
    for item in items:
        places = range(item.files.start, item.files.stop)
        for number in places:
            with _about(number):
                which = which_image(number, names)
                seen.append(
                    sizes[number] if sizes else size_of(files[number], which, max_pixels=max_pixels)
                )
        counts.append(_patches(rules, seen, item, len(items)))
        if owners.owner(sum(counts[:-1]), counts[-1]) == owners.row.rank:
            headers = [None if sizes else seen[number] for number in places]
            frames = []
            for number, header in zip(places, headers, strict=True):
                with _about(number):
                    which = which_image(number, names)
                    image = decode_image(files[number], which, max_pixels=max_pixels)
                    _refuse_lying_header(image, header, which)
                frames.append(_resized(image, seen[number]))
            mine.append(tuple(frames))
            clips.append(item.clip)
    return SampleImages(tuple(seen), tuple(items), tuple(mine), tuple(clips), owners.owners(counts))


@contextmanager
def _about(number: int) -> Iterator[None]:
    """Errors of an image, with its number."""
    try:
        yield
    except DataError as error:
        error.image = number
        raise


def _refuse_lying_header(image: Image.Image, header: Size | None, which: str) -> None:
    if header is not None and image.size != header:
        raise DataError(
            f"image {which} is {image.width} x {image.height} pixels, its header says "
            f"{header[0]} x {header[1]}",
            error_class="integrity",
        )


def layouts_of(
    rules: Rules, sizes: Sizes, names: Sequence[str], shown: Sequence[Shown] = ()
) -> list[ImageLayout]:
    """What the images and videos of a sample become.

    Args:
        sizes: (width, height) in pixels of all of its image files.

    Raises:
        DataError: (decode) a size that the family refuses; (schema) frames of a video that differ
            in size.
    """
    items = items_of(len(sizes), shown)
    return [_layout(rules, sizes, item, len(items), names) for item in items]


def _layout(
    rules: Rules, sizes: Sizes, item: Item, count: int, names: Sequence[str]
) -> ImageLayout:
    first, clip = item.files.start, item.clip
    try:
        if clip is None:
            width, height = sizes[first]
            return rules.images.layout(width, height, num_images=count)
        for place in range(first, item.files.stop):
            if tuple(sizes[place]) != tuple(sizes[first]):
                raise schema_error(
                    "frames of a video differ in size: {} is {} x {}, {} is {} x {}; expected one "
                    "size".format(
                        which_image(first, names),
                        *sizes[first],
                        which_image(place, names),
                        *sizes[place],
                    )
                )
        assert rules.videos is not None
        width, height = sizes[first]
        if (pixels := len(clip.times) * width * height) > MAX_CLIP_PIXELS:
            raise schema_error(
                f"the frames of the video from {which_image(first, names)} have {pixels:,} pixels "
                f"together; at most {MAX_CLIP_PIXELS:,} are decoded: store fewer frames, or smaller"
            )
        return rules.videos.layout(width, height, clip)
    except ValueError as error:
        what = "image" if clip is None else "video from frame"
        reason = f"{what} {which_image(first, names)}: {error}"
        raise DataError(reason, error_class="decode") from error


def _patches(rules: Rules, sizes: Sizes, item: Item, count: int) -> int:
    """What an item costs; nothing where its size is refused, which is reported later."""
    try:
        return prod(_layout(rules, sizes, item, count, ()).grid)
    except DataError:
        return 0


def _resized(image: Image.Image, size: Size) -> Image.Image:
    same = image.size == tuple(size)
    return image if same else image.resize(size, Image.Resampling.BICUBIC)
