"""Images by the processor that transformers has for a class, whatever it makes of them.

    processor(one image) -> pixel_values (7, 3, 384, 384), num_patches (1,), ...
    numbers of an image, flat, in rows of one width -> Media.pixel_values

Everything except pixels follows from an image's size. A blank image of that size shows shapes,
counts and the replacing text. So lengths are known without decoding a pixel, and the inputs of the
forward pass are restored from rows and sizes alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL.Image import Image, Resampling, fromarray, new
from torch import Tensor
from torch.nn.functional import pad

from vlmpack.errors import CapabilityError
from vlmpack.families.base import ImageLayout
from vlmpack.families.image_processor import image_processor
from vlmpack.model_folder.load import compose_processor, load_tokenizer
from vlmpack.packing import GridTHW, Media

ROW = 768
"""Numbers in a row of `Media.pixel_values`, where the processor makes no rows itself."""

TEXT_ARRAYS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What a processor makes of text."""

KEPT_SIZES = 1 << 14
"""Sizes of images that are remembered."""


@dataclass(frozen=True, slots=True)
class SizeFacts:
    """What an image becomes, as far as its size decides it.

    Args:
        shapes: of the processor's floating-point arrays, by name. They are its pixels.
        others: its other arrays, by name. The first dimension counts images.
    """

    shapes: Mapping[str, tuple[int, ...]]
    others: Mapping[str, Tensor]
    replacement: str
    width: int

    @property
    def numbers(self) -> int:
        """Pixels of all arrays together."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def rows(self) -> int:
        """Rows of the image; the last may be filled up."""
        return -(-self.numbers // self.width)

    @property
    def grid(self) -> GridTHW:
        """The processor's, where its rows are these; else all rows in a line."""
        named = self.others.get("image_grid_thw")
        if named is not None and int(named.prod()) == self.rows:
            t, h, w = named.flatten().tolist()
            return t, h, w
        return 1, 1, self.rows


@cache
def open_processor(folder: Path) -> Any:
    """The folder's processor, composed once.

    Raises:
        OSError, ValueError: its files are missing, or name no processor of transformers.
        ModelError: they name code of the folder's own.
    """
    return compose_processor(folder, load_tokenizer(folder), image_processor(folder))


@cache
def generic_image_rule(folder: Path, token: str) -> GenericImageRule:
    """The rule of a folder, made once: it remembers the sizes that it has seen.

    Raises:
        OSError, ValueError: its processor is none that can be asked.
        CapabilityError: it never writes the placeholder.
    """
    processor = open_processor(folder)
    settings = json.dumps(processor.image_processor.to_dict(), sort_keys=True, default=str)
    digest = hashlib.sha256(settings.encode()).hexdigest()[:16]
    rule = GenericImageRule(folder=folder, token=token, digest=digest)
    written = rule.facts(*PROBE).replacement
    if token not in written:
        raise CapabilityError(
            f"model.path: config.json of {folder} says that image features replace {token!r} "
            f"(image_token_id), and its processor writes {written[:60]!r} for an image. Set "
            "image_token_id to the token that repeats there"
        )
    _refuse_other_texts(processor, rule)
    return rule


PROBE = (56, 42)
"""(width, height) of the images of `_refuse_other_texts`."""


def _refuse_other_texts(processor: Any, rule: GenericImageRule) -> None:
    """Check that the processor, called on a text with two images, writes what it says of each.

    Raises:
        CapabilityError: what stands for an image depends on the text around it.
    """
    marker = getattr(processor, "image_token", None)
    marker = getattr(marker, "content", marker)
    if not isinstance(marker, str):
        return  # asking for the marker raises the error
    image, written = new("RGB", PROBE), rule.facts(*PROBE).replacement
    try:
        found = processor(
            images=[[image, image]], text=[f"a{marker}b {marker} c"], add_special_tokens=False
        )
    except Exception:  # some want more than that; what verify compares does not depend on it
        return
    ids = torch.as_tensor(found["input_ids"][0]).tolist()
    ours = processor.tokenizer(f"a{written}b {written} c", add_special_tokens=False)["input_ids"]
    if ids != ours:
        raise CapabilityError(
            f"{type(processor).__name__} writes an image otherwise where text stands beside it, "
            f"so what stands for an image does not follow from its size"
        )


@dataclass(frozen=True)
class GenericImageRule:
    """See `vlmpack.families.ImageRule`."""

    pictures_are_whole: ClassVar[bool] = False
    folder: Path
    token: str
    digest: str
    _facts: dict[tuple[int, int], SizeFacts] = field(
        default_factory=dict, repr=False, compare=False
    )

    def facts(self, width: int, height: int) -> SizeFacts:
        """What an image of that size becomes, by a blank one.

        Raises:
            ValueError: the processor refuses it.
        """
        found = self._facts.get((width, height))
        if found is None:
            if len(self._facts) >= KEPT_SIZES:
                self._facts.clear()
            arrays, text = self._process(new("RGB", (width, height)))
            pixels = {name: tuple(a.shape) for name, a in arrays.items() if a.is_floating_point()}
            others = {name: a for name, a in arrays.items() if not a.is_floating_point()}
            found = SizeFacts(
                pixels, others, text, _row_width(pixels, others.get("image_grid_thw"))
            )
            self._facts[width, height] = found
        return found

    def _process(self, image: Image) -> tuple[dict[str, Tensor], str]:
        processor = open_processor(self.folder)
        merged = processor._merge_kwargs(
            tokenizer_init_kwargs=processor.tokenizer.init_kwargs, return_tensors="pt"
        )
        try:
            found, texts = processor._process_images([[image]], **merged["images_kwargs"])
        except NotImplementedError:  # a class that has its own way to write images
            found, texts = written_by_call(processor, image)
        except (ValueError, CapabilityError):
            raise
        except Exception as error:  # a class may fail anywhere on a size that it does not take
            raise ValueError(
                f"{type(processor).__name__}: {type(error).__name__}: {error}"
            ) from error
        arrays = {
            name: value.reshape(value.shape or (1,))
            for name, value in found.items()
            if isinstance(value, Tensor) and name not in TEXT_ARRAYS
        }
        if not texts:
            raise CapabilityError(f"{type(processor).__name__} writes nothing for an image")
        return arrays, texts[0]

    def layout(self, width: int, height: int, num_images: int = 1) -> ImageLayout:
        """By the text that the processor writes."""
        facts = self.facts(width, height)
        runs: list[int] = []

        def once(match: re.Match[str]) -> str:
            runs.append(len(match[0]) // len(self.token))
            return self.token

        text = re.sub(f"(?:{re.escape(self.token)})+", once, facts.replacement)
        return ImageLayout(grid=facts.grid, text=text, runs=tuple(runs))

    def shown_size(self, width: int, height: int) -> tuple[int, int]:
        """See `vlmpack.families.base.ShowsWhole`.

        Raises:
            KeyError: the processor says no grid of patches of the whole image.
        """
        grid = self.facts(width, height).others["image_grid_thw"]
        _, rows, columns = grid.flatten().tolist()
        patch = int(open_processor(self.folder).image_processor.patch_size)
        return columns * patch, rows * patch

    def tokens_of_grid(self, grid: GridTHW) -> int:
        """Placeholders of an image with that grid: of one that was seen, else as classes do that
        merge patches."""
        for facts in self._facts.values():
            if facts.grid == grid:
                return facts.replacement.count(self.token)
        processor = open_processor(self.folder).image_processor
        return math.prod(grid) // int(getattr(processor, "merge_size", 1)) ** 2

    def preprocess(self, images: Sequence[Image]) -> Media:
        """Image by image, as the processor makes one alone."""
        parts = []
        for image in images:
            facts = self.facts(*image.size)
            arrays, _ = self._process(image)
            shapes = {name: tuple(arrays[name].shape) for name in facts.shapes}
            if shapes != dict(facts.shapes):
                raise CapabilityError(
                    f"{type(open_processor(self.folder)).__name__} makes {shapes} of an image of "
                    f"{image.size[0]} x {image.size[1]} pixels, and {dict(facts.shapes)} of a "
                    f"blank one: its lengths do not follow from sizes"
                )
            flat = torch.cat([arrays[name].flatten().float() for name in facts.shapes])
            whole = pad(flat, (0, facts.rows * facts.width - len(flat)))
            parts.append(whole.view(facts.rows, facts.width))
        return self._media(torch.cat(parts), [image.size for image in images])

    def _media(self, rows: Tensor, sizes: Sequence[tuple[int, int]]) -> Media:
        layouts = [self.layout(*size) for size in sizes]
        return Media(
            pixel_values=rows,
            grid_thw=tuple(layout.grid for layout in layouts),
            num_tokens=tuple(layout.num_tokens for layout in layouts),
            image_sizes=tuple((int(width), int(height)) for width, height in sizes),
        )

    def smallest(self) -> Media:
        """A blank image of few pixels."""
        return self.preprocess([new("RGB", (56, 56))])

    def settings(self) -> dict[str, Any]:
        """None: there are no bounds."""
        return {}

    def arguments(self, media: Media) -> dict[str, Tensor]:
        """What the processor made of the images, under its names, as one batch."""
        assert media.image_sizes is not None
        rows = media.pixel_values.split([math.prod(grid) for grid in media.grid_thw])
        gathered: dict[str, list[Tensor]] = {}
        for own, size in zip(rows, media.image_sizes, strict=True):
            facts = self.facts(*size)
            at, flat = 0, own.flatten()
            for name, shape in facts.shapes.items():
                count = math.prod(shape)
                gathered.setdefault(name, []).append(flat[at : at + count].view(shape))
                at += count
            for name, value in facts.others.items():
                gathered.setdefault(name, []).append(value.to(flat.device))
        return {name: joined(values) for name, values in gathered.items()}

    def pictures(self, media: Media) -> list[Image]:
        """Gray ones, a square for each row: how rows become pictures again is the processor's. They
        are as large as the model sees the image where the processor says it, else a square is a
        pixel."""
        assert media.image_sizes is not None
        rows = media.pixel_values.split([math.prod(grid) for grid in media.grid_thw])
        images = []
        for own, (t, h, w), size in zip(rows, media.grid_thw, media.image_sizes, strict=True):
            means = own.float().mean(1)
            low, high = means.min(), means.max()
            gray = (255 * (means - low) / (high - low).clamp(min=1e-6)).view(t * h, w)
            image = fromarray(gray.numpy().astype(np.uint8)).convert("RGB")
            says_size = "image_grid_thw" in self.facts(*size).others
            sides = self.shown_size(*size) if says_size else image.size
            images.append(image.resize(sides, Resampling.NEAREST))
        return images


def written_by_call(processor: Any, image: Image) -> tuple[Mapping[str, Any], list[str]]:
    """What a processor makes of an image, and the text, by calling it on its token alone.

    Raises:
        CapabilityError: it has no such token, or fails.
    """
    token, tokenizer = getattr(processor, "image_token", None), processor.tokenizer
    token = getattr(token, "content", token)
    if not isinstance(token, str):
        raise CapabilityError(f"{type(processor).__name__} names no image_token")
    try:
        found = processor(
            images=[[image]], text=[token], return_tensors="pt", add_special_tokens=False
        )
    except Exception as error:  # a class may need any other argument
        raise CapabilityError(
            f"{type(processor).__name__} neither says what text stands for an image "
            f"(replace_image_token) nor takes an image alone: {type(error).__name__}: {error}"
        ) from error
    ids = found["input_ids"][0]
    return found, ["".join(tokenizer.convert_ids_to_tokens(ids))]


def _row_width(pixels: Mapping[str, tuple[int, ...]], grid: Tensor | None) -> int:
    """That of the processor's own rows, a patch each; else `ROW`."""
    shapes = list(pixels.values())
    numbers, patches = sum(map(math.prod, shapes)), int(grid.prod()) if grid is not None else 0
    if patches and numbers % patches == 0:
        return numbers // patches
    return shapes[0][-1] if len(shapes) == 1 and len(shapes[0]) in (2, 3) else ROW


def joined(values: Sequence[Tensor]) -> Tensor:
    """Arrays of images one after the other; smaller ones are filled up with zeros."""
    if len({value.shape[1:] for value in values}) > 1:
        largest = [max(value.shape[axis] for value in values) for axis in range(1, values[0].ndim)]
        values = [
            pad(
                value,
                [
                    end
                    for axis in range(value.ndim - 1, 0, -1)
                    for end in (0, largest[axis - 1] - value.shape[axis])
                ],
            )
            for value in values
        ]
    return torch.cat(list(values))
