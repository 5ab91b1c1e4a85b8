"""What the model saw of a bin, taken from the very batch that the loader makes, as text.

Slots of a row run through its samples, each with its padding; a sample is shown as runs of tokens:

    segment 0  00012 (train-0.tar)  slots 0 to 71: 68 tokens, 4 of padding; 11 labels
      roles   user, assistant
      prompt  "<|im_start|>user\\n<|vision_start|>"
      image   24 tokens, grid 1 x 8 x 12
      prompt  "<|vision_end|>What is it?<|im_end|>\\n<|im_start|>assistant\\n"
      LEARNT  "42<|im_end|>"
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow.compute as pc
import torch
from PIL.Image import Image
from torch import Tensor

from vlmpack.data.index.table import SampleRef
from vlmpack.data.loading.loader import BinRequest, MicroBatch
from vlmpack.data.loading.read import SkippedSample
from vlmpack.data.pipeline import TrainData
from vlmpack.encode import Encoder, VLMSample
from vlmpack.errors import DataError, VlmpackError
from vlmpack.packing.batch import IGNORE_INDEX, GridTHW, Media, PackedBatch, PaddedBatch

MAX_CANDIDATES = 6


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Neighbouring tokens of one kind.

    Args:
        kind: `prompt` (no loss), `image` (placeholders), or `LEARNT` (the model must predict them).
        num_tokens: in it.
        text: decoded, special tokens included; the grid of an image.
    """

    kind: str
    num_tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One sample as it lies in the batch.

    Args:
        key, shard: its name.
        roles: of its turns; empty where the tokens come from saved packs.
        row: of the batch; 0 where it is packed.
        start: its first slot in the row.
        num_tokens: its own slots.
        num_padding: slots behind it, up to the next sample or the row's end.
        labels: for each of its slots, whether it carries loss.
        runs: its tokens.
        grids: of its images.
        images: the images after processing, normalisation undone.
    """

    key: str
    shard: str
    roles: tuple[str, ...]
    row: int
    start: int
    num_tokens: int
    num_padding: int
    labels: tuple[bool, ...]
    runs: tuple[TokenRun, ...]
    grids: tuple[GridTHW, ...]
    images: tuple[Image, ...]

    @property
    def num_labels(self) -> int:
        """Slots with loss."""
        return sum(self.labels)


@dataclass(frozen=True, slots=True)
class ShownBin:
    """One bin.

    Args:
        title: which one it is.
        samples: in the batch's order.
        holes: samples that were left out, with the reason.
        num_rows, num_columns: of the batch.
    """

    title: str
    samples: tuple[ShownSample, ...]
    holes: tuple[SkippedSample, ...]
    num_rows: int
    num_columns: int

    def lines(self) -> Iterator[str]:
        """The bin as text."""
        tokens = sum(sample.num_tokens for sample in self.samples)
        labels = sum(sample.num_labels for sample in self.samples)
        yield (
            f"{self.title}: {len(self.samples)} samples, {tokens} tokens, {labels} labels in "
            f"{self.num_rows} x {self.num_columns} slots"
        )
        for place, sample in enumerate(self.samples):
            where = f"row {sample.row}, slots" if self.num_rows > 1 else "slots"
            last = sample.start + sample.num_tokens + sample.num_padding - 1
            yield (
                f"segment {place}  {sample.key} ({sample.shard})  {where} {sample.start} to "
                f"{last}: {sample.num_tokens} tokens, {sample.num_padding} of padding; "
                f"{sample.num_labels} labels"
            )
            if sample.roles:
                yield f"  roles   {', '.join(sample.roles)}"
            for run in sample.runs:
                text = run.text if run.kind == "image" else json.dumps(run.text, ensure_ascii=False)
                yield f"  {run.kind:<7} {text}"
        for hole in self.holes:
            yield f"hole  {hole.key} ({hole.shard})  {hole.error_class}: {hole.reason}"


def show_bin(
    train: TrainData, encoder: Encoder, samples: Sequence[SampleRef], title: str
) -> ShownBin:
    """Load a bin as the training loader does, and take it apart.

    Args:
        train: the split.
        encoder: the split's encoder.
        samples: those of the bin.
        title: for the reader.

    Raises:
        DataError: a bad sample whose class is not skipped.
    """
    loaded = load_bin(train, samples)
    read = read_again(train, refs_of(loaded, samples))
    return take_apart(loaded, read, encoder, title)


def load_bin(train: TrainData, samples: Sequence[SampleRef]) -> MicroBatch:
    """A bin as the training loader makes it.

    Raises:
        DataError: a bad sample whose class is not skipped.
    """
    loaded = train.dataset[BinRequest(tuple(samples))]
    if isinstance(loaded, SkippedSample):
        raise loaded.to_error()
    return loaded


def refs_of(loaded: MicroBatch, samples: Sequence[SampleRef]) -> list[SampleRef]:
    """Those of a bin's samples that are in its batch, in the batch's order."""
    refs = {(ref.shard, ref.number): ref for ref in samples}
    return [refs[name.shard, name.number] for name in loaded.samples]


def read_again(train: TrainData, refs: Sequence[SampleRef]) -> list[Any]:
    """What training reads of samples: a VLMSample, or tokens where packs were saved.

    Raises:
        DataError: a sample that cannot be read any more.
    """
    found = train.dataset.read(BinRequest(tuple(refs)))
    for item in found:
        if isinstance(item, DataError):
            raise item
    return list(found)


def take_apart(loaded: MicroBatch, read: Sequence[Any], encoder: Encoder, title: str) -> ShownBin:
    """What a batch holds, sample by sample.

    Args:
        loaded: the batch.
        read: what was read of its samples, in its order; see `read_again`.
        encoder: that made it.
        title: for the reader.
    """
    batch = loaded.batch
    shown = []
    media = _media_of_samples(batch, encoder, len(loaded.samples))
    for place, ((row, start, slots), length) in enumerate(
        zip(_places(batch), batch.lengths, strict=False)
    ):
        name = loaded.samples[place]
        ids = batch.input_ids[row, start : start + length]
        labels = batch.labels[row, start : start + length]
        images = media[place]
        shown.append(
            ShownSample(
                key=name.key,
                shard=name.shard,
                roles=_roles(read[place]),
                row=row,
                start=start,
                num_tokens=length,
                num_padding=slots - length,
                labels=tuple((labels != IGNORE_INDEX).tolist()),
                runs=tuple(_runs(ids, labels, encoder, images)),
                grids=images.grid_thw if images is not None else (),
                images=tuple(encoder.image_rule.pictures(images)) if images is not None else (),
            )
        )
    rows, columns = batch.input_ids.shape
    return ShownBin(title, tuple(shown), loaded.skipped, rows, columns)


def find_samples(train: TrainData, key: str, shard: str | None = None) -> list[SampleRef]:
    """The samples with this key; shards that are not indexed yet are indexed first.

    Args:
        shard: part of the shard's path, where several shards have the key.

    Raises:
        VlmpackError: there is none.
    """
    table = train.fitted.table
    numbers = pc.indices_nonzero(pc.equal(table.keys, key)).to_pylist()
    refs = [table.ref(number) for number in numbers]
    found = [ref for ref in refs if shard is None or shard in ref.shard]
    if not found:
        where = f" in a shard like {shard!r}" if shard is not None else ""
        some = ", ".join(table.key(n) for n in range(min(MAX_CANDIDATES, table.num_samples)))
        raise VlmpackError(
            f"no sample {key!r}{where} in {train.config.key}; keys begin with {some}"
        )
    return found


def _places(batch: PackedBatch | PaddedBatch) -> Iterator[tuple[int, int, int]]:
    """(row, first slot, slots) of every segment, those without a sample included."""
    if isinstance(batch, PaddedBatch):
        rows, columns = batch.input_ids.shape
        yield from ((row, 0, columns) for row in range(rows))
        return
    start = 0
    for slots in batch.segment_lengths:
        yield 0, start, slots
        start += slots


def _media_of_samples(
    batch: PackedBatch | PaddedBatch, encoder: Encoder, count: int
) -> list[Media | None]:
    """The batch's images, sample by sample: as many as its placeholders are worth."""
    found: list[Media | None] = [None] * count
    if batch.media is None:
        return found
    counts = [t * h * w for t, h, w in batch.media.grid_thw]
    if sum(counts) != batch.media.pixel_values.shape[0]:
        return found  # nobody can say whose they are
    patches = batch.media.pixel_values.split(counts)
    sizes, image = batch.media.image_sizes, 0
    for place, (row, start, slots) in zip(range(count), _places(batch), strict=False):
        ids = batch.input_ids[row, start : start + slots]
        left = int((ids == encoder.placeholder_id).sum())
        first = image
        while left > 0 and image < batch.media.num_images:
            left -= batch.media.num_tokens[image]
            image += 1
        if image > first:
            found[place] = Media(
                pixel_values=torch.cat(patches[first:image]),
                grid_thw=batch.media.grid_thw[first:image],
                num_tokens=batch.media.num_tokens[first:image],
                image_sizes=sizes[first:image] if sizes is not None else None,
            )
    return found


def _roles(item: Any) -> tuple[str, ...]:
    return tuple(m.role for m in item.messages) if isinstance(item, VLMSample) else ()


def _runs(ids: Tensor, labels: Tensor, encoder: Encoder, media: Media | None) -> Iterator[TokenRun]:
    """Token j is learnt where position j - 1 has it as its label."""
    learnt = [False, *(labels[:-1] != IGNORE_INDEX).tolist()]
    tokens = ids.tolist()
    kinds = [
        "image" if token == encoder.placeholder_id else "LEARNT" if target else "prompt"
        for token, target in zip(tokens, learnt, strict=True)
    ]
    image = place = 0
    seen = 0  # tokens of that image so far: some families write an image in several runs
    for kind, members in groupby(kinds):
        length = sum(1 for _ in members)
        run = tokens[place : place + length]
        place += length
        if kind != "image":
            text = encoder.tokenizer.decode(run, skip_special_tokens=False)
            yield TokenRun(kind, length, text)
            continue
        while length > 0:  # images that touch each other
            if media is None or image >= media.num_images:
                yield TokenRun("image", length, f"{length} tokens, without an image")
                break
            total, (t, h, w) = media.num_tokens[image], media.grid_thw[image]
            count = min(length, total - seen)
            part = f" of {total}" if count < total else ""
            yield TokenRun("image", count, f"{count}{part} tokens, grid {t} x {h} x {w}")
            length, seen = length - count, seen + count
            if seen == total:
                image, seen = image + 1, 0
