"""Turns and images -> padded tensors for pretraining (the framework's own encoder is not used).

Legend: N samples, T tokens (longest sample), P patches, D = 3 * 2 * patch * patch, I images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2Tokenizer

from assets.build.localise import RowMarks, token_targets
from assets.build.model import IMAGE_PROCESSOR, MERGE_SIZE, PATCH_SIZE
from assets.build.questions import IMAGE_MARK, Turn

IGNORE_INDEX = -100
UNIT = PATCH_SIZE * MERGE_SIZE


@dataclass(frozen=True, slots=True)
class Sample:
    """Images and the turns that ask about them; the marks of all prompts name all images."""

    images: Sequence[Image.Image]
    turns: Sequence[Turn]
    marks: Sequence[RowMarks] = ()
    """What stands where in each image, for the localisation loss; empty when not known."""


def round_to_units(image: Image.Image) -> Image.Image:
    """The image processor's resize: both sides to the nearest multiple of one token."""
    width, height = (max(UNIT, round(side / UNIT) * UNIT) for side in image.size)
    if (width, height) == image.size:
        return image
    return image.resize((width, height), Image.BICUBIC)


def patchify(image: Image.Image) -> tuple[np.ndarray, tuple[int, int]]:
    """Normalised patches (P, D) in Qwen2-VL's merge-block order, and the grid (rows, columns)."""
    rgb = np.asarray(round_to_units(image.convert("RGB")), dtype=np.float32) / 255.0
    mean = np.array(IMAGE_PROCESSOR["image_mean"], dtype=np.float32)
    std = np.array(IMAGE_PROCESSOR["image_std"], dtype=np.float32)
    pixels = ((rgb - mean) / std).transpose(2, 0, 1)
    rows, cols = pixels.shape[1] // PATCH_SIZE, pixels.shape[2] // PATCH_SIZE
    blocks = pixels.reshape(
        3, rows // MERGE_SIZE, MERGE_SIZE, PATCH_SIZE, cols // MERGE_SIZE, MERGE_SIZE, PATCH_SIZE
    ).transpose(1, 4, 2, 5, 0, 3, 6)
    # A still image is shown twice, as the two frames of one temporal patch.
    frames = np.repeat(blocks[:, :, :, :, :, None], 2, axis=5)
    return frames.reshape(rows * cols, -1), (rows, cols)


class Encoder:
    """Chat turns to token ids, labels on answers only."""

    def __init__(self, tokenizer: Qwen2Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.pad_id = tokenizer.pad_token_id

    def ids(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens in it are recognised."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def tokens(
        self, turns: Sequence[Turn], image_tokens: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Input ids and labels of one sample, as the chat template would write it."""
        ids: list[int] = []
        labels: list[int] = []
        sizes = iter(image_tokens)
        for turn in turns:
            prompt = turn.prompt
            while IMAGE_MARK in prompt:
                pads = "<|image_pad|>" * next(sizes)
                prompt = prompt.replace(IMAGE_MARK, f"<|vision_start|>{pads}<|vision_end|>", 1)
            asked = self.ids(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
            answer = self.ids(f"{turn.answer}<|im_end|>")
            end = self.ids("\n")
            ids += asked + answer + end
            labels += [IGNORE_INDEX] * len(asked) + answer + [IGNORE_INDEX] * len(end)
        return ids, labels

    def batch(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Right-padded batch with the keyword arguments of the transformers model."""
        patches: list[np.ndarray] = []
        grids: list[tuple[int, int, int]] = []
        encoded: list[tuple[list[int], list[int]]] = []
        targets: list[np.ndarray] = []
        for sample in samples:
            first = len(grids)
            for image in sample.images:
                pixels, (rows, cols) = patchify(image)
                patches.append(pixels)
                grids.append((1, rows, cols))
            counts = [rows * cols // MERGE_SIZE**2 for _, rows, cols in grids[first:]]
            for index, mark in enumerate(sample.marks):
                _, rows, cols = grids[first + index]
                grid = (rows // MERGE_SIZE, cols // MERGE_SIZE)
                targets.append(token_targets(mark, sample.images[index].width, grid, index))
            encoded.append(self.tokens(sample.turns, counts))
        longest = max(len(ids) for ids, _ in encoded)
        input_ids = torch.full((len(samples), longest), self.pad_id)
        labels = torch.full((len(samples), longest), IGNORE_INDEX)
        mask = torch.zeros((len(samples), longest), dtype=torch.long)
        for row, (ids, answers) in enumerate(encoded):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            labels[row, : len(ids)] = torch.tensor(answers)
            mask[row, : len(ids)] = 1
        batch = {"input_ids": input_ids, "labels": labels, "attention_mask": mask}
        batch["mm_token_type_ids"] = (input_ids == self.image_id).int()
        if grids:
            batch["pixel_values"] = torch.from_numpy(np.concatenate(patches))
            batch["image_grid_thw"] = torch.tensor(grids)
        if targets:
            batch["token_targets"] = torch.from_numpy(np.concatenate(targets, axis=1))
        return batch
