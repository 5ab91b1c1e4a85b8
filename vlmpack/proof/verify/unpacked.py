"""The stock transformers class, one sample at a time, without any packing.

load -> run() each sample alone, in float32: losses, logits, outputs of its parts, gradients
     -> run(padded) the same with every sample padded to the longest, in reverse order: what
        the unpacked model differs from itself by, its noise
     -> run(dtype) each sample alone in bfloat16
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vlmpack.activity import ACTIVITY
from vlmpack.encode import Encoder
from vlmpack.families.base import kinds_of, stock_arguments
from vlmpack.packing import IGNORE_INDEX, EncodedSample
from vlmpack.packing.media import media_of
from vlmpack.proof.stock import (
    computing,
    counted_positions,
    position_counter,
    require_finite_gradients,
    require_finite_losses,
    take_gradients,
)
from vlmpack.proof.verify.outputs import (
    Point,
    captured,
    in_token_order,
    kept_slots,
    patches_of,
    points_of,
)


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What the stock model computed, on CPU.

    Args:
        losses: (l,) float32 of each sample's label tokens in order.
        logits: (n, V) of each sample's kept slots.
        outputs: of each point, (rows, D) by sample; a point that a sample did not use is absent.
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
            found = stock_arguments(family, samples[0], **tokens)
        else:
            ids = pad_sequence(
                [sample.input_ids for sample in samples],
                batch_first=True,
                padding_value=self.encoder.pad_token_id,
            )
            lengths = torch.tensor([sample.length for sample in samples])
            real = torch.arange(ids.shape[1]) < lengths[:, None]
            media = media_of(samples)
            found = {
                "input_ids": ids,
                "attention_mask": real.long(),
                **family.token_arguments(kinds_of(ids, **tokens) * real),
                **(family.image_arguments(media) if media is not None else {}),
            }
        on_device = {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in found.items()
        }
        return family.class_arguments(self.model, on_device)

    def positions(self) -> tuple[list[Tensor], str]:
        """(A, s) positions of each sample as the class counts them, and the counter's name."""
        counter = position_counter(self.model)
        if counter is None:
            return [torch.arange(s.length)[None] for s in self.samples], "0, 1, 2, ..."
        found, source = [], f"get_rope_index of {type(counter).__name__}"
        for sample in self.samples:
            arguments = self.arguments([sample])
            given = arguments.get("position_ids")
            own = counted_positions(counter, arguments) if given is None else given[:, 0].cpu()
            found.append(own)
            if given is not None:
                source = f"get_rope_index of {type(counter).__name__}, {MOVED}"
        return found, source

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
        wanted = torch.cat([*places, *(self.kept[number] for number in numbers)]).unique()
        can_choose = "logits_to_keep" in self._parameters
        only = {"logits_to_keep": wanted.to(self.device)} if can_choose else {}
        width = max(sample.length for sample in samples)
        slots = torch.cat([self.kept[number] + row * width for row, number in enumerate(numbers)])
        patches = patches_of([sample.media for sample in samples])
        with (
            torch.autocast(self.device.type, torch.bfloat16, enabled=how.autocast),
            captured(self.model, self.points, slots, patches) as found,
            computing(self.model, width),
        ):
            output = self.model(use_cache=False, **self.arguments(samples), **only)
        logits = output.logits if can_choose else output.logits[:, wanted.to(self.device)]
        losses = []
        for row, (sample, at) in enumerate(zip(samples, places, strict=True)):
            picked = logits[row, torch.searchsorted(wanted, at).to(self.device)]
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
            for path, value in found.items()
        }
        outputs = self._by_sample(ordered, numbers)
        done: list[_One] = []
        for row, number in enumerate(numbers):
            at = torch.searchsorted(wanted, self.kept[number]).to(self.device)
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
        found: list[dict[str, Tensor]] = [{} for _ in numbers]
        for path, value in outputs.items():
            counts = [self._rows[number].get(path, 0) for number in numbers]
            if sum(counts) != len(value):
                self._shared.add(path)
                continue
            for own, part, count in zip(found, value.split(counts), counts, strict=True):
                if count:
                    own[path] = part
        return found
