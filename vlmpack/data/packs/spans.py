"""One pack as it lies in a tar of the folder: its tokens as safetensors, its images as files.

    000000012.safetensors     tensors
    000000012.0000.png        the images in sample order, in kind `shards`

The tensors of n samples with T tokens, A position axes and M image tokens are int32:

    input_ids, labels    (T)
    position_ids         (A, T)
    lengths              (n)
    media_positions      (M), counted from each sample's start
    num_media_tokens, num_images, resized    (n)
    first_sequences      (n), of pairs: the tokens of the first of a sample's two sequences
    num_prefixes         (n), where packs share prefixes
    prefix_lengths, prefix_digests    (C), of each such prefix, the digests int64

A sample that could not be encoded has length 0. Any reader of WebDataset reads the tar, with a pack
as a sample. Its bytes depend on the samples alone, whichever process writes them.

Each tar is written by one process, whole or not at all.

Saved packs hold still images only. Videos are refused before any work. The index does not tell
frames from images, so the texts of samples with images are read.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from vlmpack.data.index.lengths import read_documents, text_of
from vlmpack.data.index.parts import BuildSettings
from vlmpack.data.index.shard_index import IndexBuilder, open_index
from vlmpack.data.index.table import Fitted, SampleRef
from vlmpack.data.loading.loader import BinDataset, BinRequest, check_length
from vlmpack.data.packs.manifest import Kind, MediaForm, sealed, take_seal
from vlmpack.data.shards.tar import BLOCK_BYTES, read_span
from vlmpack.data.shards.writer import ShardWriter
from vlmpack.encode.decode import suffix_of
from vlmpack.encode.sample import shows_video
from vlmpack.errors import UNREADABLE, DataError, integrity_error, or_raise, schema_error
from vlmpack.packing.batch import EncodedSample, Media, Prefix
from vlmpack.whole_file import read_json, write_atomically

_SIGN = b'"frames"'
"""Stands in the JSON of every record with a video."""


def first_video(fitted: Fitted, index: IndexBuilder, settings: BuildSettings) -> SampleRef | None:
    """The first usable sample with a video. Reads the texts of all samples with images, but no
    image.

    Raises:
        DataError: as `read_documents`.
    """
    table = fitted.table
    for place, stamp in enumerate(table.shards):
        first, stop = table.shard_starts[place : place + 2].tolist()
        usable = fitted.eligible[first:stop] & ~table.bad[first:stop]
        rows = np.flatnonzero(usable & (table.num_image_tokens[first:stop] > 0))
        if not rows.size:
            continue
        [shard] = open_index([stamp], index, settings)
        listed = shard.table.take(rows).to_pylist()
        documents = read_documents(index, stamp, listed)
        for number, row, document in zip(rows + first, listed, documents, strict=True):
            if isinstance(document, DataError) or _SIGN not in document:
                continue
            if shows_video(text_of(index, stamp, row, document).sample.shown):
                return table.ref(int(number))
    return None


def no_videos() -> DataError:
    """Why a sample with a video is not saved."""
    return schema_error(
        "the sample has a video, and packs of kinds tokens and shards hold only still images. "
        "Use vlmpack pack --kind plan, packing.mode online or in_batch. Or leave samples with "
        "videos out (data.on_error.schema: skip)"
    )


def refuse_videos(fitted: Fitted, index: IndexBuilder, settings: BuildSettings) -> None:
    """Raise at the first video before anything is encoded. Reads texts of samples with images, no
    image.

    Raises:
        DataError: (schema) the first sample with a video; as `first_video`.
    """
    video = first_video(fitted, index, settings)
    if video is not None:
        raise video.located(no_videos())


ARCHIVE_END = bytes(2 * BLOCK_BYTES)
_TOKENS = "safetensors"
_COLUMNS = ("input_ids", "labels", "position_ids", "lengths", "media_positions")
_COUNTS = ("num_media_tokens", "num_images", "resized")
_FIRST = "first_sequences"
_PREFIXES = ("num_prefixes", "prefix_lengths", "prefix_digests")


@dataclass(frozen=True, slots=True)
class SavedSample:
    """A sample as a pack keeps it.

    Args:
        resized: whether these are of the final size already.
    """

    tokens: EncodedSample
    num_images: int
    images: tuple[bytes, ...] = ()
    resized: bool = False

    @classmethod
    def of(
        cls, encoded: EncodedSample, images: tuple[bytes, ...] = (), *, resized: bool = False
    ) -> SavedSample:
        """From an encoded sample, without its pixels.

        Raises:
            DataError: (schema) it has a video.
        """
        if encoded.media is not None and encoded.media.seconds is not None:
            raise no_videos()
        num_images = 0 if encoded.media is None else encoded.media.num_images
        return cls(replace(encoded, media=None), num_images, images, resized)


def write_span(pack: int, samples: Sequence[SavedSample | None], num_axes: int) -> bytes:
    """The members of a pack in row order, headers and padding included; None stands for a hole."""
    there = [sample for sample in samples if sample is not None]
    tokens = [sample.tokens for sample in there]
    none = torch.zeros(0, dtype=torch.int64)

    def joined(pieces: list[Tensor], empty: Tensor) -> Tensor:
        return (torch.cat(pieces, dim=-1) if pieces else empty).to(torch.int32).contiguous()

    def counts(count: Callable[[SavedSample], int]) -> Tensor:
        values = [0 if sample is None else count(sample) for sample in samples]
        return torch.tensor(values, dtype=torch.int32)

    tensors = {
        "input_ids": joined([t.input_ids for t in tokens], none),
        "labels": joined([t.labels for t in tokens], none),
        "position_ids": joined([t.position_ids for t in tokens], none.expand(num_axes, 0)),
        "media_positions": joined([t.media_positions for t in tokens], none),
        "lengths": counts(lambda s: s.tokens.length),
        "num_media_tokens": counts(lambda s: len(s.tokens.media_positions)),
        "num_images": counts(lambda s: s.num_images),
        "resized": counts(lambda s: int(s.resized)),
    }
    if any(t.sequences for t in tokens):
        tensors[_FIRST] = counts(lambda s: next(iter(s.tokens.sequences), 0))
    if any(t.prefixes for t in tokens):
        tensors.update(_prefix_columns([() if s is None else s.tokens.prefixes for s in samples]))
    keys = json.dumps([None if s is None else s.tokens.key for s in samples])
    stream = io.BytesIO()
    writer, key = ShardWriter(stream), f"{pack:09d}"
    writer.write(key, {_TOKENS: save(tensors, {"keys": keys})})
    images = [image for sample in there for image in sample.images]
    for place, image in enumerate(images):  # one by one: by name they came before the tokens
        writer.write(key, {f"{place:04d}.{suffix_of(image)}": image})
    size = writer.size
    writer.close()
    return stream.getvalue()[:size]


def read_pack(span: bytes, *, shard: str, offset: int) -> list[SavedSample | None]:
    """The samples of a pack, with its images where it holds any.

    Raises:
        DataError: class `integrity`: not such a span.
    """
    found = read_span(span, shard=shard, base=offset, max_member_bytes=len(span))
    members = list(found)

    def damaged(why: str) -> DataError:
        return integrity_error(
            f"the pack at byte {offset} of {shard} {why}; it was not written by this version of "
            "`vlmpack pack`"
        )

    if not members or members[0].field != _TOKENS or members[0].data is None:
        raise damaged("does not begin with its tokens")
    try:
        tensors = load(members[0].data)
    except SafetensorError as error:
        raise damaged(f"has tokens that cannot be read ({error})") from error
    if missing := [name for name in (*_COLUMNS, *_COUNTS) if name not in tensors]:
        raise damaged(f"has no {missing[0]}")
    images = [member.data or b"" for member in members[1:]]
    if any(bool((tensors[name] < 0).any()) for name in ("lengths", *_COUNTS)):
        raise damaged("has a count below 0")
    if len(images) not in (0, int(tensors["num_images"].sum())):
        raise damaged(f"has {len(images)} images for {int(tensors['num_images'].sum())}")
    try:
        return _split(tensors, images, key=members[0].key)
    except (*UNREADABLE, RuntimeError) as error:  # torch's split raises the last
        raise damaged(f"has columns that do not fit each other ({error})") from error


def _split(tensors: dict[str, Tensor], images: list[bytes], key: str) -> list[SavedSample | None]:
    lengths, media = tensors["lengths"].tolist(), tensors["num_media_tokens"].tolist()
    resized = tensors["resized"].tolist()
    pair_firsts = tensors.get(_FIRST, torch.zeros(len(lengths))).int().tolist()
    ids, labels = (tensors[name].long().split(lengths) for name in ("input_ids", "labels"))
    positions = tensors["position_ids"].long().split(lengths, dim=1)
    media_positions = tensors["media_positions"].long().split(media)
    prefixes = _prefixes_of(tensors, len(lengths))
    samples: list[SavedSample | None] = []
    first = 0
    for place, count in enumerate(tensors["num_images"].tolist()):
        mine = tuple(images[first : first + count])
        first += count
        if not lengths[place]:
            samples.append(None)
            continue
        tokens = EncodedSample(
            key=f"{key}/{place}",
            input_ids=ids[place],
            labels=labels[place],
            position_ids=positions[place],
            media_positions=media_positions[place],
            sequences=_sequences(pair_firsts[place], lengths[place]),
            prefixes=prefixes[place],
        )
        samples.append(SavedSample(tokens, count, mine, bool(resized[place])))
    return samples


def _prefix_columns(prefixes: Sequence[tuple[Prefix, ...]]) -> dict[str, Tensor]:
    """The prefixes of each sample as columns, by name."""
    flat = [prefix for each in prefixes for prefix in each]
    digests = [int.from_bytes(prefix.digest, "little", signed=True) for prefix in flat]
    columns = ([len(each) for each in prefixes], [prefix.length for prefix in flat], digests)
    return {
        name: torch.tensor(column, dtype=torch.int64)
        for name, column in zip(_PREFIXES, columns, strict=True)
    }


def _prefixes_of(tensors: dict[str, Tensor], count: int) -> list[tuple[Prefix, ...]]:
    """The prefixes of each of a pack's samples; none where it has no columns of them."""
    if _PREFIXES[0] not in tensors:
        return [()] * count
    counts, lengths, digests = (tensors[name].tolist() for name in _PREFIXES)
    flat = [
        Prefix(length, digest.to_bytes(8, "little", signed=True))
        for length, digest in zip(lengths, digests, strict=True)
    ]
    if len(counts) != count or min(counts, default=0) < 0 or sum(counts) != len(flat):
        raise ValueError(f"{len(flat)} prefixes for counts {counts[:5]}")
    ends = list(accumulate(counts, initial=0))
    return [tuple(flat[start:stop]) for start, stop in pairwise(ends)]


def _sequences(first: int, length: int) -> tuple[int, ...]:
    """Tokens of each sequence of a pair; () of a sample that is none."""
    return (first, length - first) if first else ()


@dataclass(frozen=True, slots=True)
class PartJob:
    """A tar to write."""

    number: int
    first: int
    packs: tuple[tuple[SampleRef, ...], ...]


@dataclass(frozen=True, slots=True)
class PartFacts:
    """The contents of a tar, written next to it until the folder is finished.

    Args:
        offsets, lengths, crc32s: of each pack's span.
        holes: sample number -> (error class, reason) of those that could not be encoded.
        num_kept_original: samples whose images could not be saved resized.
    """

    number: int
    num_bytes: int
    offsets: list[int]
    lengths: list[int]
    crc32s: list[int]
    holes: dict[int, tuple[str, str]]
    num_kept_original: int

    @property
    def num_packs(self) -> int:
        """The number of packs in the tar."""
        return len(self.offsets)


def tar_name(number: int) -> str:
    """The name of a tar in the folder."""
    return f"packs-{number:06d}.tar"


def facts_path(folder: Path, number: int) -> Path:
    """Where a tar's facts lie until the folder is finished."""
    return folder / f"packs-{number:06d}.json"


def read_facts(folder: Path, number: int) -> PartFacts | None:
    """The facts of a complete tar; None where it must be written."""
    try:
        value: dict[str, Any] = read_json(facts_path(folder, number))
        size = (folder / tar_name(number)).stat().st_size
        if not take_seal(value):
            return None
        holes = {int(key): (name, reason) for key, (name, reason) in value.pop("holes").items()}
        facts = PartFacts(**value, holes=holes)
    except UNREADABLE:
        return None
    return facts if facts.num_bytes == size else None


@dataclass(frozen=True, slots=True)
class WritePart:
    """Writes one tar; picklable."""

    folder: Path
    dataset: BinDataset
    kind: Kind
    media: MediaForm | None
    num_axes: int

    def __call__(self, job: PartJob) -> PartFacts:
        """The tar and its facts, unless both are there.

        Raises:
            DataError: a sample that cannot be encoded and may not be left out.
        """
        if parent_process() is not None:  # the others have the other cores
            torch.set_num_threads(1)
        facts = read_facts(self.folder, job.number)
        return facts if facts is not None else self._write(job)

    def _write(self, job: PartJob) -> PartFacts:
        path = self.folder / tar_name(job.number)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        spans: list[tuple[int, int]] = []
        holes: dict[int, tuple[str, str]] = {}
        num_originals = 0
        with temporary.open("wb") as file:
            for place, refs in enumerate(job.packs):
                samples, originals = self._samples(refs, holes)
                span = write_span(job.first + place, samples, self.num_axes)
                file.write(span)
                spans.append((len(span), zlib.crc32(span)))
                num_originals += originals
            file.write(ARCHIVE_END)
        temporary.replace(path)
        lengths = [length for length, _ in spans]
        facts = PartFacts(
            number=job.number,
            num_bytes=sum(lengths) + len(ARCHIVE_END),
            offsets=[0, *accumulate(lengths[:-1])],
            lengths=lengths,
            crc32s=[crc32 for _, crc32 in spans],
            holes=holes,
            num_kept_original=num_originals,
        )
        write_atomically(
            facts_path(self.folder, job.number), json.dumps(sealed(asdict(facts))).encode()
        )
        return facts

    def _samples(
        self, refs: Sequence[SampleRef], holes: dict[int, tuple[str, str]]
    ) -> tuple[list[SavedSample | None], int]:
        """The samples of a pack, and how many keep their original images though asked to resize."""
        samples: list[SavedSample | None] = []
        num_originals = 0
        readings = self.dataset.read(BinRequest(tuple(refs)))
        for ref, reading in zip(refs, readings, strict=True):
            try:
                encoded = self.dataset.encode(ref, or_raise(reading))
                check_length(encoded, ref)
                saved, is_kept = self._saved(encoded, reading.images)
            except DataError as error:
                if not self.dataset.policy.skips(error.error_class):
                    raise ref.located(error) from None
                holes[ref.number] = (error.error_class, error.reason)
                samples.append(None)
                continue
            samples.append(saved)
            num_originals += is_kept
        return samples, num_originals

    def _saved(self, encoded: EncodedSample, images: tuple[bytes, ...]) -> tuple[SavedSample, bool]:
        if self.kind == "tokens" or encoded.media is None:
            return SavedSample.of(encoded), False
        if self.media == "resized":
            files = self._resized(encoded.media)
            if files is not None:
                return SavedSample.of(encoded, files, resized=True), False
        return SavedSample.of(encoded, images), self.media == "resized"

    def _resized(self, media: Media) -> tuple[bytes, ...] | None:
        """The images as the encoder resized them; None where they would not give the same
        pixels."""
        encoder = self.dataset.encoder
        files = tuple(_png(picture) for picture in encoder.image_rule.pictures(media))
        again = encoder.pixels(files)
        assert again is not None  # there are images
        same = again.grid_thw == media.grid_thw and torch.equal(
            again.pixel_values, media.pixel_values
        )
        return files if same else None


def _png(picture: Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, format="PNG")
    return out.getvalue()
