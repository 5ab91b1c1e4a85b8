"""Numbered samples packed online, and saved as packs, by an encoder without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from support.shard_fakes import FakeEncoder, open_data

from vlmpack.data.packs.manifest import Manifest
from vlmpack.data.packs.write import PackOrder, PackSource, make_packs
from vlmpack.data.pipeline import TrainData
from vlmpack.encode.sample import Message, TextPart, VLMSample
from vlmpack.packing.batch import Media
from vlmpack.packing.budget import RowBudget

BUDGET = RowBudget(max_tokens=64, alignment=4)
SIZES: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": 3, "seq_length": 64}


@dataclass(frozen=True)
class PackEncoder(FakeEncoder):
    """The fake one with what saved packs ask for besides."""

    tokenizer: str = "bytes"

    @property
    def fingerprint_parts(self) -> dict[str, str]:
        return {
            "rules": self.fingerprint,
            "tokenizer": self.tokenizer,
            "template": "none",
            "processor": "blocks",
            "made_with": "blocks",
        }

    @property
    def image_rule(self) -> PackEncoder:
        return self

    def pictures(self, media: Media) -> list[Image.Image]:
        """Of other pixels than the media has: the fake one keeps sums alone."""
        return [Image.new("RGB", (16 * count, 16)) for count in media.num_tokens]

    def pixels(
        self, files: Sequence[bytes], sizes: Sequence[tuple[int, int]] | None = None
    ) -> Media | None:
        messages = (Message("assistant", (TextPart("x"),)),)
        return self.encode(
            VLMSample(key="", url="", messages=messages, images=tuple(files)), sizes
        ).media


def online(folder: Path, index_dir: Path, **changes: Any) -> TrainData:
    values = {"mode": "online", "budget": BUDGET, "encoder": PackEncoder(), **SIZES}
    return open_data(str(folder / "s-*.tar"), index_dir, **(values | changes))


def pack(data: TrainData, folder: Path, **order: Any) -> Manifest:
    order = {"part_packs": 4, **order}
    return make_packs(PackSource(data.config, data.split, data.dataset), folder, PackOrder(**order))
