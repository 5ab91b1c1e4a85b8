"""The tars of a folder of packs, each written by one process, whole or not at all."""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image

from vlmpack.data.index.table import SampleRef
from vlmpack.data.loading.loader import BinDataset, BinRequest, check_length
from vlmpack.data.loading.workers import start_worker
from vlmpack.data.packs.manifest import Kind, MediaForm, sealed, take_seal
from vlmpack.data.packs.spans import ARCHIVE_END, SavedSample, write_span
from vlmpack.errors import UNREADABLE, DataError, or_raise
from vlmpack.packing.batch import EncodedSample, Media
from vlmpack.whole_file import read_json, write_atomically


@dataclass(frozen=True, slots=True)
class PartJob:
    """A tar to write."""

    number: int
    first: int
    packs: tuple[tuple[SampleRef, ...], ...]


@dataclass(frozen=True, slots=True)
class PartFacts:
    """What a tar holds; written next to it until the folder is finished.

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
    maker: int

    def __call__(self, job: PartJob) -> PartFacts:
        """The tar and its facts, unless both are there.

        Raises:
            DataError: a sample that cannot be encoded and may not be left out.
        """
        if parent_process() is not None:
            _settle(self.maker)
        facts = read_facts(self.folder, job.number)
        return facts if facts is not None else self._write(job)

    def _write(self, job: PartJob) -> PartFacts:
        path = self.folder / tar_name(job.number)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        spans: list[tuple[int, int]] = []
        holes: dict[int, tuple[str, str]] = {}
        kept = 0
        with temporary.open("wb") as file:
            for place, refs in enumerate(job.packs):
                samples, originals = self._samples(refs, holes)
                span = write_span(job.first + place, samples, self.num_axes)
                file.write(span)
                spans.append((len(span), zlib.crc32(span)))
                kept += originals
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
            num_kept_original=kept,
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
        kept = 0
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
            kept += is_kept
        return samples, kept

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


@cache
def _settle(maker: int) -> None:
    """Once in each process of a pool."""
    start_worker(0, trainer=maker)


def _png(picture: Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, format="PNG")
    return out.getvalue()
