"""The stock transformers class, one sample at a time, without any packing.

run()         each sample alone, in float32. Gives losses, logits, outputs of its parts, gradients
run(padded)   the same in reverse order, with every sample padded to the longest. The difference
              from run() is the unpacked model's noise
run(dtype)    each sample alone in bfloat16

Outputs of a model's parts are captured by forward hooks, here and in `packed.py`, under
transformers' names. The language model's have one row for each slot. Of long samples only evenly
spaced slots are kept. The vision part's outputs are kept whole, in image order.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vlmpack.activity import ACTIVITY
from vlmpack.backends.hf.recurrence import recurrent_modules
from vlmpack.encode import Encoder
from vlmpack.families.base import ModulePaths, kinds_of, stock_arguments
from vlmpack.packing import IGNORE_INDEX, EncodedSample, Media
from vlmpack.packing.media import media_of
from vlmpack.proof.stock import (
    computing,
    counted_positions,
    position_counter,
    require_finite_gradients,
    require_finite_losses,
    take_gradients,
)

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
    points: list[Point] = []
    if paths.vision is not None:
        points += [Point(path, "tower") for path, _ in _layers(model, paths.vision)]
        points.append(Point(paths.vision, "tower"))
    modules = dict(model.named_modules())
    points += [
        Point(path, "projector")
        for path in paths.projectors
        if path in modules and not isinstance(modules[path], nn.ModuleList)
    ]
    points += [
        Point(path, "language model", bool(recurrent_modules(layer)))
        for path, layer in _layers(model, paths.language)
    ]
    points.append(Point(paths.language, "language model"))
    return points


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
    slots = []
    for sample in samples:
        count = min(sample.length, max(FEWEST_SLOTS, int(sample.length * share)))
        slots.append(torch.linspace(0, sample.length - 1, count).round().long().unique())
    return slots


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
    outputs: dict[str, Tensor] = {}

    def keep(point: Point, _module: nn.Module, _args: Any, output: Any) -> None:
        value = _tensor(output)
        if value is None:
            return
        value = _own_rows(value.detach(), () if point.kind == "language model" else patches)
        if point.kind == "language model" and slots is not None:
            value = value.index_select(0, slots.to(value.device))
        before = [outputs[point.path]] if point.path in outputs else []
        outputs[point.path] = torch.cat([*before, value.float().cpu()])

    with ExitStack() as hooks:
        for point in points:
            module = model.get_submodule(point.path)
            hooks.enter_context(module.register_forward_hook(partial(keep, point)))
        yield outputs


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


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What the stock model computed, on CPU.

    Args:
        losses: (l,) float32 of each sample's label tokens in order.
        logits: (n, V) of each sample's kept slots.
        outputs: of each point, (rows, D) by sample; a point that a sample did not use is missing.
        gradients: of the mean loss over all label tokens, or of losses by the given weights, under
            transformers' names.
    """

    losses: list[Tensor]
    logits: list[Tensor]
    outputs: list[dict[str, Tensor]]
    gradients: dict[str, Tensor]


MOVED = "text behind a video moved behind its time (docs/video.md)"
"""The one known difference from a class of transformers; see `QwenVL.class_arguments`."""

_One = tuple[int, Tensor, Tensor, dict[str, Tensor]]
"""A sample's number, and its losses, logits and outputs: see `Unpacked`."""


@dataclass(frozen=True, slots=True)
class How:
    """How samples are run.

    Args:
        together: samples in a padded batch; 1 for each alone, without padding.
        reverse: the last batch first, so that gradients are summed in another order.
        autocast: run matmuls in bfloat16.
    """

    together: int = 1
    reverse: bool = False
    autocast: bool = False


class StockModel:
    """The stock model of a folder.

    Args:
        weights: of each sample's summed loss in what is differentiated; None for the mean loss
            over all label tokens.

    Raises:
        ModelError: the folder cannot be loaded.
    """

    def __init__(
        self,
        encoder: Encoder,
        samples: Sequence[EncodedSample],
        device: torch.device,
        weights: Sequence[float] | None = None,
    ) -> None:
        from vlmpack.backends.hf.load import load_model

        self.encoder, self.samples, self.device = encoder, samples, device
        self.model: Any = load_model(encoder.folder).to(device).eval()
        self.points: list[Point] = points_of(self.model, encoder.family.modules)
        text = self.model.config.get_text_config()
        layers = sum(point.kind == "language model" for point in self.points)
        self.kept = kept_slots(samples, text.vocab_size + layers * text.hidden_size)
        self.weights = [1 / self.num_labels] * len(samples) if weights is None else weights
        self._parameters = inspect.signature(self.model.forward).parameters
        self._rows: dict[int, dict[str, int]] = {}
        self._shared: set[str] = set()

    @property
    def num_labels(self) -> int:
        return sum(int((sample.labels != IGNORE_INDEX).sum()) for sample in self.samples)

    def arguments(self, samples: Sequence[EncodedSample]) -> dict[str, Any]:
        """The forward's arguments on the model's device, for one sample or a padded batch."""
        family, tokens = self.encoder.family, self.encoder.placeholders
        if len(samples) == 1:
            arguments = stock_arguments(family, samples[0], **tokens)
        else:
            ids = pad_sequence(
                [sample.input_ids for sample in samples],
                batch_first=True,
                padding_value=self.encoder.pad_token_id,
            )
            lengths = torch.tensor([sample.length for sample in samples])
            real = torch.arange(ids.shape[1]) < lengths[:, None]
            media = media_of(samples)
            arguments = {
                "input_ids": ids,
                "attention_mask": real.long(),
                **family.token_arguments(kinds_of(ids, **tokens) * real),
                **(family.image_arguments(media) if media is not None else {}),
            }
        on_device = {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        return family.class_arguments(self.model, on_device)

    def positions(self) -> tuple[list[Tensor], str]:
        """(A, s) positions of each sample as the class counts them, and the counter's name."""
        counter = position_counter(self.model)
        if counter is None:
            return [torch.arange(s.length)[None] for s in self.samples], "0, 1, 2, ..."
        positions, source = [], f"get_rope_index of {type(counter).__name__}"
        for sample in self.samples:
            arguments = self.arguments([sample])
            given = arguments.get("position_ids")
            own = counted_positions(counter, arguments) if given is None else given[:, 0].cpu()
            positions.append(own)
            if given is not None:
                source = f"get_rope_index of {type(counter).__name__}, {MOVED}"
        return positions, source

    def run(self, how: How = How()) -> Unpacked:
        self.model.zero_grad(set_to_none=True)
        numbers = range(len(self.samples))
        groups = [list(numbers[at : at + how.together]) for at in numbers[:: how.together]]
        done = [
            one
            for group in (groups[::-1] if how.reverse else groups)
            for one in self._run_group(group, how)
        ]
        done.sort(key=lambda one: one[0])
        # A table that is looked up once for all images has rows that are no sample's.
        self.points = [point for point in self.points if point.path not in self._shared]
        _, losses, logits, outputs = map(list, zip(*done, strict=True))
        gradients = take_gradients(self.model)
        if how.together == 1:  # padding may be no numbers
            require_finite_gradients("verify: the stock model", gradients)
        return Unpacked(losses, logits, outputs, gradients)

    def _run_group(self, numbers: Sequence[int], how: How) -> list[_One]:
        ACTIVITY.moved()
        samples = [self.samples[number] for number in numbers]
        places = [(sample.labels != IGNORE_INDEX).nonzero()[:, 0] for sample in samples]
        kept_places = torch.cat([*places, *(self.kept[number] for number in numbers)]).unique()
        can_choose = "logits_to_keep" in self._parameters
        only = {"logits_to_keep": kept_places.to(self.device)} if can_choose else {}
        width = max(sample.length for sample in samples)
        slots = torch.cat([self.kept[number] + row * width for row, number in enumerate(numbers)])
        patches = patches_of([sample.media for sample in samples])
        with (
            torch.autocast(self.device.type, torch.bfloat16, enabled=how.autocast),
            captured(self.model, self.points, slots, patches) as captures,
            computing(self.model, width),
        ):
            output = self.model(use_cache=False, **self.arguments(samples), **only)
        logits = output.logits if can_choose else output.logits[:, kept_places.to(self.device)]
        losses = []
        for row, (sample, at) in enumerate(zip(samples, places, strict=True)):
            picked = logits[row, torch.searchsorted(kept_places, at).to(self.device)]
            targets = sample.labels[at].to(self.device)
            losses.append(F.cross_entropy(picked.float(), targets, reduction="none"))
        if len(samples) == 1:
            self._require_finite(samples[0], (losses[0], logits), how)
        weighted = [
            each.sum() * self.weights[number] for each, number in zip(losses, numbers, strict=True)
        ]
        torch.stack(weighted).sum().backward()
        vision = {point.path for point in self.points if point.kind != "language model"}
        ordered = {
            path: in_token_order(value, [sample.media for sample in samples])
            if path in vision and not self.encoder.family.frames_as_images
            else value
            for path, value in captures.items()
        }
        outputs = self._by_sample(ordered, numbers)
        done: list[_One] = []
        for row, number in enumerate(numbers):
            at = torch.searchsorted(kept_places, self.kept[number]).to(self.device)
            picked = logits.detach()[row, at].float().cpu()
            done.append((number, losses[row].detach().cpu(), picked, outputs[row]))
        return done

    def _require_finite(
        self, sample: EncodedSample, values: tuple[Tensor, Tensor], how: How
    ) -> None:
        def forward() -> None:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=how.autocast):
                self.model(use_cache=False, **self.arguments([sample]))

        name = f"verify: the stock model on {sample.key}"
        require_finite_losses(name, self.model, values, forward)

    def _by_sample(
        self, outputs: dict[str, Tensor], numbers: Sequence[int]
    ) -> list[dict[str, Tensor]]:
        """Each point's output by sample, without padding."""
        if len(numbers) == 1:
            self._rows[numbers[0]] = {path: len(value) for path, value in outputs.items()}
            return [outputs]
        by_sample: list[dict[str, Tensor]] = [{} for _ in numbers]
        for path, value in outputs.items():
            counts = [self._rows[number].get(path, 0) for number in numbers]
            if sum(counts) != len(value):
                self._shared.add(path)
                continue
            for own, part, count in zip(by_sample, value.split(counts), counts, strict=True):
                if count:
                    own[path] = part
        return by_sample
