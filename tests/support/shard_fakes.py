"""Small shards and a fake encoder for the tests of the data layer.

The encoder costs one token a byte of text and one a 16 x 16 block of an image, and really decodes,
so that lengths, orientation and decode errors are the real thing at toy size.
"""

from __future__ import annotations

import io
import json
import math
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import webdataset as wds
from PIL import Image, ImageOps

from vlmpack.alignment import Alignment
from vlmpack.data.config import DataConfig
from vlmpack.data.loading.loader import MicroBatch, WorkerSettings
from vlmpack.data.modes import MODES
from vlmpack.data.pipeline import TrainData
from vlmpack.data.splits.survey import DataLaunch
from vlmpack.encode.sample import VLMSample
from vlmpack.encode.settings import EncoderSettings
from vlmpack.errors import DataError
from vlmpack.families.base import ModulePaths
from vlmpack.packing.batch import IGNORE_INDEX, EncodedSample, Media
from vlmpack.packing.budget import RowBudget
from vlmpack.packing.collate import PackCollator
from vlmpack.recipe.data import DataSection
from vlmpack.recipe.schema import PackingSection, TrainingSection
from vlmpack.recipe.sources import Source

BLOCK = 16
COUNT = 61
"""Samples of the small split in `folder` (conftest)."""

Fields = dict[str, bytes]


def image_bytes(
    width: int, height: int, *, seed: int = 0, kind: str = "PNG", orientation: int = 1
) -> bytes:
    """A random picture as a file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    stream = io.BytesIO()
    exif = Image.Exif()
    if orientation != 1:
        exif[0x0112] = orientation
    image.save(stream, kind, exif=exif)
    return stream.getvalue()


def chat_json(text: str, answer: str, num_images: int = 0) -> bytes:
    """A chat document with its images first."""
    parts: list[dict[str, str]] = [{"type": "image"} for _ in range(num_images)]
    messages = [
        {"role": "user", "content": [*parts, {"type": "text", "text": text}]},
        {"role": "assistant", "content": answer},
    ]
    return json.dumps({"messages": messages}).encode()


def sample_fields(number: int, *, num_images: int | None = None) -> Fields:
    """A valid sample whose length and image count vary with its number."""
    count = number % 3 if num_images is None else num_images
    fields: Fields = {"json": chat_json(f"q{number} " + "x" * (number % 7), f"a{number}", count)}
    for index in range(count):
        fields[f"{index}.png"] = image_bytes(8 + number % 40, 20, seed=number * 10 + index)
    return fields


def key_of(number: int) -> str:
    """The key that `write_shards` gives to a sample."""
    return f"{number:05d}"


def write_shard(
    path: Path, samples: Iterable[tuple[str, Fields]], mtime: float | None = None
) -> Path:
    """A shard as webdataset writes it; its members are of now unless a time is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wds.TarWriter(str(path), mtime=mtime) as writer:
        for key, fields in samples:
            writer.write({"__key__": key, **fields})
    return path


def write_shards(folder: Path, count: int, *, per_shard: int, start: int = 0) -> str:
    """`count` numbered samples in shards; returns their glob."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard, first in enumerate(range(start, start + count, per_shard)):
        content = _shard_of(first, min(first + per_shard, start + count))
        (folder / f"s-{shard:04d}.tar").write_bytes(content)
    return str(folder / "s-*.tar")


@cache
def _shard_of(first: int, end: int) -> bytes:
    """A shard of numbered samples, as webdataset writes it."""
    made = io.BytesIO()
    with wds.TarWriter(made) as writer:
        for number in range(first, end):
            writer.write({"__key__": key_of(number), **sample_fields(number)})
    return made.getvalue()


@dataclass(frozen=True)
class FakeLength:
    num_tokens: int
    num_image_tokens: int
    num_label_tokens: int
    num_patches: int
    num_chosen_tokens: int = 0


def image_tokens(width: int, height: int) -> int:
    return math.ceil(width / BLOCK) * math.ceil(height / BLOCK)


class FakeFamily:
    """A family without a vision tower to be told anything."""

    modules: ClassVar[ModulePaths] = ModulePaths(vision=None, projectors=(), language="model")

    def tower_rule_of(self, folder: Path) -> None:
        """None."""


@dataclass(frozen=True)
class FakeEncoder:
    """Bytes as tokens.

    Args:
        refuse: texts that the "template" cannot render.
        wrong: texts whose predicted length is off by one.
        crash: texts on which the code itself fails.
        hang: texts that take a minute.
        die: texts that kill the process.
    """

    pad_token_id: ClassVar[int] = 0
    num_position_axes: ClassVar[int] = 1
    settings: ClassVar[EncoderSettings] = EncoderSettings()
    each_answer: ClassVar[bool] = False
    folder: ClassVar[Path] = Path()
    family: ClassVar[FakeFamily] = FakeFamily()
    fingerprint: str = "fake-1"
    refuse: frozenset[str] = field(default_factory=frozenset)
    wrong: frozenset[str] = field(default_factory=frozenset)
    crash: frozenset[str] = field(default_factory=frozenset)
    hang: frozenset[str] = field(default_factory=frozenset)
    die: frozenset[str] = field(default_factory=frozenset)

    def doubt(self, sample: VLMSample, sizes: Any = None) -> None:
        """No text of these tests has boxes."""

    def length(
        self, sample: VLMSample, sizes: Sequence[tuple[int, int]], originals: Any = None
    ) -> FakeLength:
        assert len(sizes) == sample.num_images
        text = "".join(message.text for message in sample.messages)
        if any(word in text for word in self.refuse):
            raise DataError("the template cannot render this", error_class="schema")
        labels = sum(len(m.text.encode()) for m in sample.messages if m.role == "assistant")
        images = sum(image_tokens(*size) for size in sizes)
        wrong = any(word in text for word in self.wrong)
        return FakeLength(len(text.encode()) + images + wrong, images, labels, images)

    def encode(
        self, sample: VLMSample, sizes: Sequence[tuple[int, int]] | None = None
    ) -> EncodedSample:
        text = "".join(message.text for message in sample.messages)
        if any(word in text for word in self.crash):
            raise ZeroDivisionError("a bug, not bad data")
        if any(word in text for word in self.hang):
            time.sleep(60)
        if any(word in text for word in self.die):
            os.kill(os.getpid(), signal.SIGKILL)
        pixels, counts = [], []
        for index, data in enumerate(sample.images):
            image = decode(data)
            if sizes is not None:
                image = image.resize(sizes[index])
            count = image_tokens(*image.size)
            counts.append(count)
            flat = torch.from_numpy(np.asarray(image, dtype=np.float32).copy()).flatten()
            pixels.append(torch.full((count, 4), float(flat.sum())))
        ids = [*([1] * sum(counts)), *text.encode()]
        answer = len(next(m for m in sample.messages if m.role == "assistant").text.encode())
        labels = [IGNORE_INDEX] * (len(ids) - answer - 1) + ids[len(ids) - answer :]
        labels = [*labels, IGNORE_INDEX][: len(ids)]
        media = (
            Media(
                pixel_values=torch.cat(pixels),
                grid_thw=tuple((1, 1, count) for count in counts),
                num_tokens=tuple(counts),
            )
            if counts
            else None
        )
        return EncodedSample(
            key=sample.key,
            input_ids=torch.tensor(ids),
            labels=torch.tensor(labels),
            position_ids=torch.arange(len(ids))[None],
            media=media,
            media_positions=torch.arange(sum(counts)),
        )


def decode(data: bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data))
        return ImageOps.exif_transpose(image).convert("RGB")
    except OSError as error:
        raise DataError(f"cannot decode: {error}", error_class="decode") from error


def collator() -> PackCollator:
    return PackCollator(pad_token_id=0, num_position_axes=1)


def one_pattern(paths: str | tuple[str, ...]) -> str:
    """Several paths as one brace list."""
    if isinstance(paths, str):
        return paths
    common = os.path.commonprefix(paths)  # noqa: RUF071 - by characters
    return f"{common}{{{','.join(path[len(common) :] for path in paths)}}}"


def loading(num_workers: int, *, prefetch_batches: int = 2, **settings: Any) -> dict[str, Any]:
    """Arguments of `config_for`: how batches are loaded."""
    workers = WorkerSettings(**settings)
    return {"num_workers": num_workers, "prefetch_batches": prefetch_batches, "workers": workers}


def config_for(paths: str | tuple[str, ...], index_dir: Path, **changes: Any) -> DataConfig:
    """A small configuration over one source.

    Args:
        changes: fields of it, and of the sections data, training and packing; for its mode,
            `budget` and `multiples` too.
    """
    sources = changes.pop("sources", None) or (Source(name="one", path=one_pattern(paths)),)
    data: dict[str, Any] = {"index_dir": str(index_dir), "num_workers": 0, "train": sources}
    training = {"seq_length": 4096, "micro_batch_size": 3, "global_batch_size": 8, "seed": 7}
    packing: dict[str, Any] = {}
    values: dict[str, Any] = {"num_probed": 2}
    sections = ((data, DataSection), (training, TrainingSection), (packing, PackingSection))
    for name, value in changes.items():
        of = next((given for given, section in sections if name in section.model_fields), values)
        of[name] = value
    section = PackingSection(**packing)
    values["mode"] = MODES[section.mode](
        packing=section,
        budget=values.pop("budget", RowBudget(max_tokens=training["seq_length"])),
        multiples=values.pop("multiples", Alignment(sequence=1, row=1)),
    )
    return DataConfig(data=DataSection(**data), training=TrainingSection(**training), **values)


def open_data(paths: str | tuple[str, ...], index_dir: Path, **changes: Any) -> TrainData:
    """The split, with the fake encoder unless another is given."""
    encoder = changes.pop("encoder", FakeEncoder())
    ledger, resume = changes.pop("ledger", None), changes.pop("resume", None)
    fetcher = changes.pop("fetcher", None)
    config = config_for(paths, index_dir, **changes)
    launch = DataLaunch(resume=resume)
    return TrainData.open(config, encoder, ledger=ledger, launch=launch, fetcher=fetcher)


def micro_batches(data: TrainData, steps: int = 6) -> list[MicroBatch]:
    found = data.batches(data.start(), rank=0, dp=1, max_steps=steps)
    return [micro for step in found for micro in step.micro_batches]


def assert_same_tensors(one: MicroBatch, two: MicroBatch) -> None:
    assert one.samples == two.samples
    assert torch.equal(one.batch.input_ids, two.batch.input_ids)
    assert torch.equal(one.batch.labels, two.batch.labels)
    assert (one.batch.media is None) == (two.batch.media is None)
    if one.batch.media is not None and two.batch.media is not None:
        assert torch.equal(one.batch.media.pixel_values, two.batch.media.pixel_values)


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 16 samples, or as many more as whole global batches have."""
    monkeypatch.setattr("vlmpack.data.plan.packers.MIN_WINDOW_SAMPLES", 16)
