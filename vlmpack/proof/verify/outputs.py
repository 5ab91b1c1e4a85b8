"""Outputs of a transformers model's parts, captured by forward hooks under the same names.

The language model's outputs have one row for each slot. Of long samples only evenly spaced slots
are kept. The vision part's outputs are kept whole, in image order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vlmpack.backends.hf.recurrence import recurrent_modules
from vlmpack.families.base import ModulePaths
from vlmpack.packing import EncodedSample, Media

Kind = Literal["tower", "projector", "language model"]

KEPT_NUMBERS = 1 << 27
"""Numbers that are kept of all samples' outputs together: 512 MiB in float32."""

FEWEST_SLOTS = 8
"""Slots that are kept of a sample, however large the model is."""


@dataclass(frozen=True, slots=True)
class Point:
    """A module whose output is compared.

    Args:
        recurrent: whether it carries a state along the row.
    """

    path: str
    kind: Kind
    recurrent: bool = False

    def __str__(self) -> str:
        return f"{self.path} (recurrent)" if self.recurrent else self.path


def points_of(model: nn.Module, paths: ModulePaths) -> list[Point]:
    """The tower's layers and the tower, the projectors, the decoder's layers and the decoder."""
    found: list[Point] = []
    if paths.vision is not None:
        found += [Point(path, "tower") for path, _ in _layers(model, paths.vision)]
        found.append(Point(paths.vision, "tower"))
    modules = dict(model.named_modules())
    found += [
        Point(path, "projector")
        for path in paths.projectors
        if path in modules and not isinstance(modules[path], nn.ModuleList)
    ]
    found += [
        Point(path, "language model", bool(recurrent_modules(layer)))
        for path, layer in _layers(model, paths.language)
    ]
    found.append(Point(paths.language, "language model"))
    return found


def _layers(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """The modules of the longest stack under a path, with their own paths."""
    stacks = [
        (name, stack)
        for name, stack in model.get_submodule(path).named_modules()
        if isinstance(stack, nn.ModuleList)
    ]
    if not stacks:
        return []
    name, layers = max(stacks, key=lambda item: len(item[1]))
    return [(f"{path}.{name}.{number}", layer) for number, layer in enumerate(layers)]


def has_experts(module: nn.Module) -> bool:
    """Whether samples share matmuls by expert, so that their sizes depend on each other."""
    return any(name.endswith("experts") for name, _ in module.named_modules())


def kept_slots(samples: Sequence[EncodedSample], numbers_per_slot: int) -> list[Tensor]:
    """For each sample (n,) int64 slots, evenly spaced, the first and the last among them."""
    tokens = sum(sample.length for sample in samples)
    share = min(1.0, KEPT_NUMBERS / max(1, numbers_per_slot * tokens))
    found = []
    for sample in samples:
        count = min(sample.length, max(FEWEST_SLOTS, int(sample.length * share)))
        found.append(torch.linspace(0, sample.length - 1, count).round().long().unique())
    return found


@contextmanager
def captured(
    model: nn.Module,
    points: Sequence[Point],
    slots: Tensor | None = None,
    patches: Sequence[int] = (),
) -> Iterator[dict[str, Tensor]]:
    """Collect outputs of points of a transformers model in a block.

    Args:
        slots: (n,) int64 flat slots that are kept of the language model's outputs; None for all.
        patches: of each image of the call. Rows after an image's own patches are left out, if the
            tower or projector pads images.

    Yields:
        (rows, D) of each point that was called, by its path, calls one after another.
    """
    found: dict[str, Tensor] = {}

    def keep(point: Point, _module: nn.Module, _args: Any, output: Any) -> None:
        value = _tensor(output)
        if value is None:
            return
        value = _own_rows(value.detach(), () if point.kind == "language model" else patches)
        if point.kind == "language model" and slots is not None:
            value = value.index_select(0, slots.to(value.device))
        before = [found[point.path]] if point.path in found else []
        found[point.path] = torch.cat([*before, value.float().cpu()])

    with ExitStack() as hooks:
        for point in points:
            module = model.get_submodule(point.path)
            hooks.enter_context(module.register_forward_hook(partial(keep, point)))
        yield found


def _own_rows(value: Tensor, patches: Sequence[int]) -> Tensor:
    """(rows, D) without the rows that pad images."""
    padded = len(set(patches)) > 1 and value.shape[:-1] == (len(patches), max(patches))
    if not padded:
        return value.flatten(0, -2)
    return torch.cat([image[:count] for image, count in zip(value, patches, strict=True)])


def patches_of(media: Sequence[Media | None]) -> list[int]:
    return [math.prod(grid) for one in media if one is not None for grid in one.grid_thw]


def in_token_order(value: Tensor, media: Sequence[Media | None]) -> Tensor:
    """(rows, D) of a tower or projector in the samples' order of images and videos.

    transformers runs all still images first, and then all videos.

    Args:
        value: (rows, D), as many rows for each patch everywhere.
    """
    shown = [one for one in media if one is not None]
    seconds = [each for one in shown for each in one.seconds or [None] * one.num_images]
    patches = patches_of(shown)
    counts = [count * len(value) // max(1, sum(patches)) for count in patches]
    if all(each is None for each in seconds) or sum(counts) != len(value):
        return value
    run = sorted(range(len(counts)), key=lambda number: seconds[number] is not None)
    parts = dict(zip(run, value.split([counts[number] for number in run]), strict=True))
    return torch.cat([parts[number] for number in range(len(counts))])


def _tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):  # transformers' outputs are ordered dictionaries
        output = tuple(output.values())
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    return None
