"""The reference: transformers' own model, processor files and loss, one sample at a time.

Nothing of vlmpack is used here, neither to encode nor to compute.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
PLACEHOLDER = "<|image_pad|>"
ASSISTANT_TURN = re.compile(r"(?<=<\|im_start\|>assistant\n).*?<\|im_end\|>", re.DOTALL)


@dataclass(frozen=True)
class StockInputs:
    """What the stock model's forward takes for one sample, and unshifted labels."""

    input_ids: Tensor  # (1, s)
    labels: Tensor  # (1, s), not shifted
    mm_token_type_ids: Tensor  # (1, s), 1 on placeholders
    pixel_values: Tensor | None  # (P, D)
    image_grid_thw: Tensor | None  # (I, 3)
    has_tower: bool = True  # the model's, not the sample's

    def media(self) -> dict[str, Tensor]:
        """The image arguments, none for text."""
        if self.pixel_values is None:
            return {}
        return {"pixel_values": self.pixel_values, "image_grid_thw": self.image_grid_thw}

    def arguments(self) -> dict[str, Tensor]:
        """All that a forward pass takes."""
        kinds = {"mm_token_type_ids": self.mm_token_type_ids} if self.has_tower else {}
        return {"input_ids": self.input_ids, **kinds, **self.media()}


class StockProcessor:
    """Tokenizer and image processor of a folder, composed as Qwen2_5_VLProcessor does it."""

    def __init__(self, folder: Path, *, loss_on: Literal["assistant", "all"] = "assistant"):
        self.tokenizer = AutoTokenizer.from_pretrained(str(folder))
        self.has_tower = has_tower(folder)
        self.images = AutoImageProcessor.from_pretrained(str(folder)) if self.has_tower else None
        self.loss_on = loss_on

    def __call__(self, sample: RawSample) -> StockInputs:
        messages = sample.messages if self.has_tower else with_strings(sample.messages)
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        pixels, grids = None, None
        if sample.images:
            opened = [Image.open(BytesIO(data)).convert("RGB") for data in sample.images]
            features = self.images(images=opened, return_tensors="pt")
            pixels, grids = features["pixel_values"], features["image_grid_thw"]
            counts = iter((grids.prod(dim=1) // self.images.merge_size**2).tolist())
            text = re.sub(re.escape(PLACEHOLDER), lambda _: PLACEHOLDER * next(counts), text)
        encoded = self.tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
        ids = encoded["input_ids"]
        is_image = ids == self.tokenizer.convert_tokens_to_ids(PLACEHOLDER)
        if self.loss_on == "all":
            target = ~is_image
        else:
            spans = [match.span() for match in ASSISTANT_TURN.finditer(text)]
            starts = encoded["offset_mapping"][0, :, 0].tolist()
            target = torch.tensor([[any(a <= s < b for a, b in spans) for s in starts]])
        return StockInputs(
            input_ids=ids,
            labels=torch.where(target, ids, torch.full_like(ids, IGNORED)),
            mm_token_type_ids=is_image.int(),
            pixel_values=pixels,
            image_grid_thw=grids,
            has_tower=self.has_tower,
        )


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
    """The stock model with stock attention (sdpa)."""
    auto = AutoModelForImageTextToText if has_tower(folder) else AutoModelForCausalLM
    return auto.from_pretrained(str(folder), dtype=dtype, attn_implementation="sdpa")


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
    """(3, s) positions from the stock model's own get_rope_index; (1, s) without a tower."""
    if not inputs.has_tower:
        return torch.arange(inputs.input_ids.shape[1])[None]
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
        output = model(
            attention_mask=torch.ones_like(inputs.input_ids),
            use_cache=False,
            **inputs.arguments(),
        )
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
    images: dict[str, Tensor] = {}
    if rows[0].has_tower:
        images["mm_token_type_ids"] = padded([row.mm_token_type_ids for row in rows], 0)
    pixels = [row.pixel_values for row in rows if row.pixel_values is not None]
    grids = [row.image_grid_thw for row in rows if row.image_grid_thw is not None]
    if pixels:
        images |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.cat(grids)}
    output = model(
        input_ids=padded([row.input_ids for row in rows], pad_token_id),
        attention_mask=padded([torch.ones_like(row.input_ids) for row in rows], 0),
        use_cache=False,
        **images,
    )
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
