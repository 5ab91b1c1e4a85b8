"""The reference: transformers' own model, processor files and loss, one sample at a time.

Nothing of vlmpack is used here, neither to encode nor to compute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from PIL import Image
from support.runs import Run
from support.shards import RawSample
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

IGNORED = -100
CHATML_ANSWER = re.compile(r"(?<=<\|im_start\|>assistant\n).*?<\|im_end\|>", re.DOTALL)

Media = dict[str, Any]
"""Image arguments of a forward pass."""


def concatenate(media: Sequence[Media]) -> Media:
    """The images of several samples as one batch, where they lie one after the other."""
    return {name: torch.cat([item[name] for item in media]) for name in media[0]}


def open_processor(folder: Path) -> Any:
    """The image processor of a model folder."""
    return AutoImageProcessor.from_pretrained(str(folder))


def call_processor(processor: Any, images: list[Any]) -> Any:
    """An image processor on the images of a sample, with its own settings."""
    return processor(images=images, return_tensors="pt")


def as_they_are(_: Any, arguments: Media) -> Media:
    """What most classes are called with."""
    return arguments


@dataclass(frozen=True, kw_only=True)
class StockRules:
    """What the processor class of a family does with images; for language models the defaults.

    Args:
        placeholder: the token that an image feature replaces.
        marker: what the chat template writes for an image; None where it is the placeholder.
        written: (features of the image processor for one image, that processor) -> the text that
            the family's processor class puts in place of the marker.
        written_together: (features for all images of a sample, processor) -> the texts, where one
            depends on the others; in place of `written`.
        processor: model folder -> its image processor.
        call: (image processor, images of a sample) -> its features, called as the family's
            processor class does.
        media: features of the image processor for all images of a sample -> what the forward takes.
        seen: what the forward takes -> the same without pixels that the tower leaves out.
        kinds: name of the forward's argument that is 1 on placeholders; None for none.
        join: arguments of several samples -> of their batch.
        prepared: (model, arguments with an attention mask) -> what its forward is called with.
        answer: finds the assistant's turns in a rendered conversation.
        positions: (model, inputs) -> (A, s); None for 0, 1, 2 ...
    """

    placeholder: str = ""
    marker: str | None = None
    written: Callable[[Any, Any], str] | None = None
    written_together: Callable[[Any, Any], list[str]] | None = None
    processor: Callable[[Path], Any] = open_processor
    call: Callable[[Any, list[Any]], Any] = call_processor
    media: Callable[[Any], Media] = dict
    seen: Callable[[Media], Media] = dict
    kinds: str | None = None
    join: Callable[[Sequence[Media]], Media] = concatenate
    prepared: Callable[[Any, Media], Media] = as_they_are
    answer: re.Pattern[str] = CHATML_ANSWER
    positions: Callable[[Any, StockInputs], Tensor] | None = None


@dataclass(frozen=True)
class StockInputs:
    """What the stock model's forward takes for one sample, and unshifted labels."""

    input_ids: Tensor  # (1, s)
    labels: Tensor  # (1, s), not shifted
    is_image: Tensor  # (1, s) bool, True on placeholders
    media: Media  # empty for text
    rules: StockRules

    @property
    def pixel_values(self) -> Tensor | None:
        """As the forward takes them."""
        return self.media.get("pixel_values")

    @property
    def image_grid_thw(self) -> Tensor | None:
        """(I, 3), for families that have it."""
        return self.media.get("image_grid_thw")

    @property
    def mm_token_type_ids(self) -> Tensor:
        """(1, s), 1 on placeholders."""
        return self.is_image.int()

    def kinds(self) -> dict[str, Tensor]:
        """What the forward wants to know about ids."""
        return {} if self.rules.kinds is None else {self.rules.kinds: self.is_image.int()}

    def arguments(self) -> dict[str, Tensor]:
        """All that a forward pass takes."""
        return {"input_ids": self.input_ids, **self.kinds(), **self.media}

    def prepared(self, model: Any) -> dict[str, Any]:
        """The same with its attention mask, as the model is to be called."""
        mask = {"attention_mask": torch.ones_like(self.input_ids)}
        return self.rules.prepared(model, {**self.arguments(), **mask})


class StockProcessor:
    """Tokenizer and image processor of a folder, composed as the family's processor does it."""

    def __init__(self, folder: Path, *, loss_on: Literal["assistant", "all"] = "assistant"):
        from support.families import stock_rules

        self.tokenizer = AutoTokenizer.from_pretrained(str(folder))
        self.has_tower = has_tower(folder)
        self.rules = stock_rules(folder)
        self.images = self.rules.processor(folder) if self.has_tower else None
        self.loss_on = loss_on

    def __call__(self, sample: RawSample) -> StockInputs:
        rules = self.rules
        messages = sample.messages if self.has_tower else with_strings(sample.messages)
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        media: Media = {}
        if sample.images:
            opened = [Image.open(BytesIO(data)).convert("RGB") for data in sample.images]
            features = rules.call(self.images, opened)
            written = iter(self._written(features, opened))
            media = rules.media(features)
            marker = rules.placeholder if rules.marker is None else rules.marker
            text = re.sub(re.escape(marker), lambda _: next(written), text)
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, return_tensors="pt"
        )
        ids = encoded["input_ids"]
        is_image = torch.zeros_like(ids, dtype=torch.bool)
        if rules.placeholder:
            is_image = ids == self.tokenizer.convert_tokens_to_ids(rules.placeholder)
        if self.loss_on == "all":
            target = ~is_image
        else:
            spans = [match.span() for match in rules.answer.finditer(text)]
            starts = encoded["offset_mapping"][0, :, 0].tolist()
            target = torch.tensor([[any(a <= s < b for a, b in spans) for s in starts]])
        return StockInputs(
            input_ids=ids,
            labels=torch.where(target, ids, torch.full_like(ids, IGNORED)),
            is_image=is_image,
            media=media,
            rules=rules,
        )

    def _written(self, features: Any, images: list[Any]) -> list[str]:
        """What each image of a sample is written as."""
        rules = self.rules
        if rules.written_together is not None:
            return rules.written_together(features, self.images)
        return [rules.written(rules.call(self.images, [image]), self.images) for image in images]


def with_strings(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each message's content as one string: what templates of language models take."""
    return [
        {"role": m["role"], "content": "".join(part["text"] for part in m["content"])}
        for m in messages
    ]


def has_tower(folder: Path) -> bool:
    """Whether the folder's model is a vision-language model, by its transformers config."""
    return "vision_config" in AutoConfig.from_pretrained(str(folder)).to_dict()


def load_stock(folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """The stock model with stock attention (sdpa).

    Its weights are copied out of the mapped file, where they begin at any multiple of 8 bytes: some
    processors' matrix products take another path there, and the last bits of logits differ by it.
    """
    auto = AutoModelForImageTextToText if has_tower(folder) else AutoModelForCausalLM
    model = auto.from_pretrained(str(folder), dtype=dtype, attn_implementation="sdpa")
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the labelled tokens of one sample; (s, V) logits, (s,) unshifted labels."""
    losses = F.cross_entropy(
        logits[:-1].float(), labels[1:], ignore_index=IGNORED, reduction="none"
    )
    return losses[labels[1:] != IGNORED]


def gradients_of(model: Any) -> dict[str, Tensor]:
    """Copies of the gradients, zeros where there is none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
    }


def positions_of(model: Any, inputs: StockInputs) -> Tensor:
    """(A, s) positions that the stock model itself would use."""
    if inputs.rules.positions is not None:
        return inputs.rules.positions(model, inputs)
    return torch.arange(inputs.input_ids.shape[1])[None]


def rope_index(model: Any, inputs: StockInputs) -> Tensor:
    """(3, s) positions from the stock model's own get_rope_index."""
    positions, _ = model.model.get_rope_index(
        inputs.input_ids,
        mm_token_type_ids=inputs.mm_token_type_ids,
        image_grid_thw=inputs.image_grid_thw,
    )
    return positions[:, 0]


def run_one_by_one(model: Any, samples: dict[str, StockInputs]) -> Run:
    """Each sample in a forward pass of its own; gradients of the mean over all label tokens."""
    model.zero_grad(set_to_none=True)
    num_labels = sum(int((s.labels[0, 1:] != IGNORED).sum()) for s in samples.values())
    losses: dict[str, Tensor] = {}
    for key, inputs in samples.items():
        output = model(use_cache=False, **inputs.prepared(model))
        losses[key] = token_losses(output.logits[0], inputs.labels[0])
        (losses[key].sum() / num_labels).backward()
    return Run(
        losses={key: value.detach() for key, value in losses.items()},
        gradients=gradients_of(model),
        positions={key: positions_of(model, inputs) for key, inputs in samples.items()},
        lengths={key: inputs.input_ids.shape[1] for key, inputs in samples.items()},
    )


def run_padded(model: Any, samples: dict[str, StockInputs], *, pad_token_id: int) -> Run:
    """The same samples as one right-padded batch with an attention mask: the unpacked noise."""
    model.zero_grad(set_to_none=True)
    width = max(inputs.input_ids.shape[1] for inputs in samples.values())

    def padded(values: Sequence[Tensor], fill: int) -> Tensor:
        return torch.cat([F.pad(v, (0, width - v.shape[1]), value=fill) for v in values])

    rows = list(samples.values())
    rules = rows[0].rules
    images: dict[str, Tensor] = {}
    if rules.kinds is not None:
        images[rules.kinds] = padded([row.mm_token_type_ids for row in rows], 0)
    shown = [row.media for row in rows if row.media]
    if shown:
        images |= rules.join(shown)
    arguments = {
        "input_ids": padded([row.input_ids for row in rows], pad_token_id),
        "attention_mask": padded([torch.ones_like(row.input_ids) for row in rows], 0),
        **images,
    }
    output = model(use_cache=False, **rules.prepared(model, arguments))
    labels = padded([row.labels for row in rows], IGNORED)
    losses = {
        key: token_losses(output.logits[index], labels[index]) for index, key in enumerate(samples)
    }
    torch.cat(list(losses.values())).mean().backward()
    return Run(
        losses={key: value.detach() for key, value in losses.items()},
        gradients=gradients_of(model),
        positions={key: positions_of(model, inputs) for key, inputs in samples.items()},
        lengths={key: inputs.input_ids.shape[1] for key, inputs in samples.items()},
    )
