"""From a saved pack to the encoded samples that the collator takes.

Tokens come from the pack. Pixels are made here, from the pack's own images (kind `shards`) or from
those of the original shards (kind `tokens`): both are what the encoder itself makes of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vlmpack.data.index.table import PackPlace, SampleRef
from vlmpack.data.loading.loader import BinDataset, BinRequest
from vlmpack.data.loading.read import SampleReader
from vlmpack.data.packs.spans import SavedSample, read_pack
from vlmpack.data.protocols import Collator
from vlmpack.encode import Encoder
from vlmpack.errors import DataError
from vlmpack.packing.batch import EncodedSample
from vlmpack.packing.image_owners import SampleShare
from vlmpack.recipe.data import OnErrorSection
from vlmpack.storage.fetch import LocalFetcher


class SavedBins(BinDataset):
    """Request -> MicroBatch, from saved packs. Samples without a place in one are read anew.

    Args: those of BinDataset.
    """

    def __init__(
        self, reader: SampleReader, encoder: Encoder, collator: Collator, policy: OnErrorSection
    ) -> None:
        super().__init__(reader, encoder, collator, policy)
        self.packs = LocalFetcher()

    def read(self, request: BinRequest) -> Sequence[Any]:
        """See BinDataset: a SavedSample with its images, or a DataError."""
        found: dict[int, Any] = {}
        packs: dict[tuple[str, int], list[SavedSample | None] | DataError] = {}
        for place, ref in enumerate(request.samples):
            if ref.pack is None:
                continue
            name = (ref.pack.stamp.path, ref.pack.offset)
            if name not in packs:
                packs[name] = load_pack(self.packs, ref.pack)
            found[place] = _sample(packs[name], ref)
        anew = [
            place
            for place, ref in enumerate(request.samples)
            if place not in found or _wants_images(found[place])
        ]
        if anew:
            cooked = self.reader.read_all([request.samples[place] for place in anew])
            for place, sample in zip(anew, cooked, strict=True):
                saved = found.get(place)
                if saved is None or isinstance(sample, DataError):
                    found[place] = sample
                else:
                    found[place] = _with_images(saved, sample.images)
        return [found[place] for place in range(len(request.samples))]

    def encode(
        self, ref: SampleRef, reading: Any, share: SampleShare | None = None
    ) -> EncodedSample:
        """See BinDataset."""
        if not isinstance(reading, SavedSample):
            return super().encode(ref, reading, share)
        sizes = None if reading.resized else ref.sizes
        how = (sizes,) if share is None else (sizes, share)
        media = self.encoder.pixels(reading.images, *how) if reading.num_images else None
        if self.encoder.settings.pairs and not reading.tokens.sequences:
            raise DataError(
                "the pack has one sequence of it, and a pair has two; pack again",
                error_class="integrity",
            )
        each = max(1, len(reading.tokens.sequences))  # both sequences of a pair have its images
        expected = 0 if media is None else sum(media.num_tokens) * each
        saved = reading.tokens.media_positions.shape[0]
        if expected != saved:
            raise DataError(
                f"its images make {expected} image tokens, the pack has {saved}; the image "
                "processor changed, or the images",
                error_class="integrity",
            )
        return replace(reading.tokens, key=ref.key, media=media)


def load_pack(fetcher: LocalFetcher, pack: PackPlace) -> list[SavedSample | None] | DataError:
    """A pack's samples, or why it cannot be used."""
    try:
        span = fetcher.read(pack.stamp, pack.offset, pack.length)
        crc32 = zlib.crc32(span)
        if crc32 != pack.crc32:
            raise DataError(
                f"the pack at byte {pack.offset} of {pack.stamp.path} is damaged: its checksum is "
                f"{crc32:08x}, {pack.crc32:08x} was written",
                error_class="integrity",
            )
        return read_pack(span, shard=pack.stamp.path, offset=pack.offset)
    except DataError as error:
        return error


def _sample(pack: list[SavedSample | None] | DataError, ref: SampleRef) -> SavedSample | DataError:
    try:
        SampleReader.raise_known(ref)
    except DataError as error:
        return error
    assert ref.pack is not None
    if isinstance(pack, DataError):
        return _located(pack, ref, ref.pack)
    saved = pack[ref.pack.place] if ref.pack.place < len(pack) else None
    if saved is None:
        missing = DataError(
            f"{ref.pack.stamp.path} has no tokens of it at byte {ref.pack.offset}",
            error_class="integrity",
        )
        return _located(missing, ref, ref.pack)
    return saved


def _located(error: DataError, ref: SampleRef, pack: PackPlace) -> DataError:
    """What is wrong with a pack, as one of its samples has it."""
    return DataError(
        error.reason,
        error_class=error.error_class,
        key=ref.key,
        shard=ref.shard,
        offset=ref.offset,
        file=pack.stamp.path,
    )


def _wants_images(item: SavedSample | DataError) -> bool:
    return isinstance(item, SavedSample) and item.num_images > len(item.images)


def _with_images(saved: SavedSample, images: tuple[bytes, ...]) -> SavedSample | DataError:
    if len(images) != saved.num_images:
        return DataError(
            f"the pack was made from {saved.num_images} images, the shard has {len(images)}",
            error_class="integrity",
        )
    return replace(saved, images=images)
