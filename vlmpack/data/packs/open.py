"""A folder of packs, checked against the recipe, opened as a split, and read bin by bin.

Tokens come from the pack. Pixels are made here, from the pack's own images (kind `shards`) or from
those of the original shards (kind `tokens`). Both equal what the encoder itself makes of a sample.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vlmpack.data.config import DataConfig
from vlmpack.data.index.lengths import ShardBuilder
from vlmpack.data.index.parts import BuildSettings
from vlmpack.data.index.table import Fitted, Int64s, PackPlace, SampleRef
from vlmpack.data.loading.loader import BinDataset, BinRequest
from vlmpack.data.loading.read import SampleReader
from vlmpack.data.packs.manifest import (
    ARRAYS,
    MANIFEST,
    SAMPLES,
    Manifest,
    PackSpans,
    check_index,
    check_packs,
    digest,
    load_arrays,
    load_samples,
    note_makers,
    read_manifest,
    refuse_rollouts,
)
from vlmpack.data.packs.spans import SavedSample, read_pack, tar_name
from vlmpack.data.packs.write import HOLES
from vlmpack.data.plan.batches import PlanSource
from vlmpack.data.plan.packers import Bin, BudgetPacker
from vlmpack.data.plan.packs import PACK_RULE, PackArrays, PackPlan
from vlmpack.data.plan.state import DataState, Identity
from vlmpack.data.protocols import Collator
from vlmpack.data.splits.indexed import prepare_split
from vlmpack.data.splits.split import KnownSplit, OnDropped, probed_samples
from vlmpack.data.splits.summary import dropped_samples, short_digest
from vlmpack.data.splits.survey import Survey, list_shards, survey_split
from vlmpack.encode import Encoder
from vlmpack.errors import UNREADABLE, DataError, PacksError, integrity_error, or_error
from vlmpack.packing.batch import EncodedSample
from vlmpack.packing.image_owners import SampleOwners
from vlmpack.recipe.data import OnErrorSection
from vlmpack.storage.fetch import Fetcher, LocalFetcher, ShardStamp
from vlmpack.whole_file import parse_small_json, regular_bytes
from vlmpack.words import indented


@dataclass(frozen=True)
class PackedSplit(KnownSplit):
    """Saved packs and the samples that they were made from.

    Args:
        config, fitted, identity, plan: see KnownSplit; samples have the numbers that the packs use.
        spans: where packs lie; None for kind `plan`, whose samples are read from their shards.
        holes: sample number -> (error class, reason) of those that could not be encoded.
    """

    plan: PackPlan
    manifest: Manifest
    spans: PackSpans | None
    files: tuple[ShardStamp, ...]
    holes: dict[int, tuple[str, str]]

    def ref(self, number: int) -> SampleRef:
        """See Split."""
        ref = self.fitted.table.ref(number)
        if number in self.holes:
            error_class, reason = self.holes[number]
            ref = replace(ref, error_class=error_class, reason=reason)
        if self.spans is None:
            return ref
        packs, places = self._places
        if packs[number] < 0:
            return ref
        return replace(ref, pack=self._pack_place(int(packs[number]), int(places[number])))

    def refs(self, samples: Bin) -> tuple[SampleRef, ...]:
        """See Split. All are in the bin's own pack, while `ref` knows one of a sample's packs."""
        refs = [self.ref(number) for number in samples]
        pack = self._pack_of(samples) if self.spans is not None else None
        if pack is None:
            return tuple(refs)
        return tuple(
            replace(ref, pack=self._pack_place(pack, place)) for place, ref in enumerate(refs)
        )

    def pass_bins(self, places: Sequence[int], each: int) -> list[Bin]:
        """See Split: bins as in the packs, so that each pack is read once. Holes and samples in no
        pack are left out."""
        numbers = np.array([n for n in places if n not in self.holes], dtype=np.int64)
        packs, within = (column[numbers] for column in self._places)
        order = np.lexsort((within, packs))
        order = order[packs[order] >= 0]
        cuts = np.flatnonzero(np.diff(packs[order])) + 1
        bins = (members.tolist() for members in np.split(numbers[order], cuts))
        return [tuple(members) for members in bins if members]

    def probed(self, count: int, state: DataState) -> list[SampleRef]:
        """See Split. None where the original shards need not be there."""
        return [] if self.manifest.kind == "shards" else probed_samples(self.fitted, count)

    @cached_property
    def _places(self) -> tuple[Int64s, Int64s]:
        """(N,) a pack of each sample, -1 for none, and its (N,) place in it."""
        arrays, count = self.plan.arrays, self.fitted.table.num_samples
        packs, places = np.full(count, -1, np.int64), np.zeros(count, np.int64)
        packs[arrays.numbers] = np.repeat(np.arange(arrays.num_packs), arrays.sizes)
        within = np.arange(arrays.numbers.shape[0]) - np.repeat(arrays.starts[:-1], arrays.sizes)
        places[arrays.numbers] = within
        return packs, places

    @cached_property
    def _by_first(self) -> tuple[Int64s, Int64s]:
        """(P,) the first sample of each pack, ascending, and the packs in that order."""
        arrays = self.plan.arrays
        firsts = arrays.numbers[arrays.starts[:-1]]
        order = np.argsort(firsts, kind="stable")
        return firsts[order], order

    def _pack_of(self, samples: Bin) -> int | None:
        """The pack with exactly these members; None for a bin that is none."""
        if not samples:
            return None
        firsts, order = self._by_first
        at = int(np.searchsorted(firsts, samples[0]))
        while at < len(firsts) and firsts[at] == samples[0]:
            if self.plan.arrays.members(int(order[at])) == tuple(samples):
                return int(order[at])
            at += 1
        return None

    def _pack_place(self, pack: int, index: int) -> PackPlace:
        spans = self.spans
        assert spans is not None
        return PackPlace(
            stamp=self.files[int(spans.files[pack])],
            offset=int(spans.offsets[pack]),
            length=int(spans.lengths[pack]),
            crc32=int(spans.crc32s[pack]),
            place=index,
        )


def survey_data(
    config: DataConfig, encoder: Encoder, fetcher: Fetcher, resume: DataState | None = None
) -> Survey:
    """The shards of a split in any mode. Packs of kind `shards` need none of them.

    Raises:
        RecipeError, DataError: as survey_split.
        PacksError: there are no finished packs.
    """
    if not config.mode.facts.reads_packs:
        return survey_split(config, encoder, fetcher, resume)
    if read_manifest(_folder(config)).kind == "shards":
        return Survey((), "none")
    return Survey(list_shards(config, fetcher), "global")


def _folder(config: DataConfig) -> Path:
    path = config.mode.packing.path
    assert path is not None  # the recipe's rules see to it
    return Path(path)


def open_packed(
    config: DataConfig,
    survey: Survey,
    builder: ShardBuilder,
    settings: BuildSettings,
    on_dropped: OnDropped,
) -> PackedSplit:
    """Opens saved packs.

    Raises:
        PacksError: they are unfinished or damaged, or do not fit the recipe or its shards.
        DataError, EmptyDataError: as prepare_split, for kinds that need the original shards.
    """
    folder = _folder(config)
    manifest = read_manifest(folder)
    check_packs(manifest, folder, config, builder.lengths.encoder)
    refuse_rollouts(builder.lengths.encoder, manifest.kind)
    note_makers(manifest, builder.lengths.encoder)
    tars, small = check_files(manifest, folder)
    arrays, spans = load_arrays(folder / ARRAYS, small[ARRAYS])
    if arrays.fingerprint != manifest.plan:
        raise _not_as_written(folder, [f"{ARRAYS}: other packs than fingerprints.plan says"])
    if manifest.packs_by_batch:
        _check_sets(manifest, folder, arrays)
    if manifest.kind == "shards":
        fitted = load_samples(folder / SAMPLES, small[SAMPLES])
    else:
        prepared = prepare_split(config, survey, builder, settings)
        check_index(manifest, folder, prepared.identity, config.key)
        fitted = prepared.fitted
    on_dropped(dropped_samples(fitted))
    plan = PackPlan(
        arrays,
        sources=_sources(config, fitted, arrays),
        seed=config.training.seed,
        packer=BudgetPacker(
            budget=manifest.budget,
            global_batch_size=config.training.global_batch_size,
            scope="batch" if manifest.packs_by_batch else "stream",
            sizes=fitted.table.sizes,
            fullest=int(arrays.sizes.max(initial=0)),
        ),
        keeps_order=(manifest.planner == "stream" or manifest.packs_by_batch)
        and (manifest.seed, manifest.global_batch_size)
        == (config.training.seed, config.training.global_batch_size),
    )
    return PackedSplit(
        config=config,
        manifest=manifest,
        fitted=fitted,
        identity=_identity(config, manifest),
        plan=plan,
        spans=spans,
        files=tars,
        holes=_read_holes(folder, small[HOLES]) if manifest.kind != "plan" else {},
    )


def _check_sets(manifest: Manifest, folder: Path, arrays: PackArrays) -> None:
    sizes, most = arrays.set_sizes, manifest.global_batch_size
    if not sizes.size or int(sizes.max()) > most:
        place = int(sizes.argmax()) if sizes.size else 0
        what = f"set {place} has {int(sizes[place])} samples" if sizes.size else "no set"
        raise _not_as_written(folder, [f"{ARRAYS}: {what}, global_batch_size is {most}"])


_BUDGET_KNOBS = ("packing.alignment", "packing.max_sequences")
"""The parts of the budget that a plan of packs has in addition to the packs."""


def _identity(config: DataConfig, manifest: Manifest) -> Identity:
    """What decides the order. The samples are those of the packs: that was compared."""
    return {
        "plan": PACK_RULE,
        "data.seed": config.training.seed,
        "data.shuffle": manifest.shuffle,
        "packing.mode": config.mode.name,
        "packing.packs": manifest.plan,
        **({"packing.scope": "batch"} if manifest.packs_by_batch else {}),
        **({"packing.share_prefix": True} if manifest.share_prefix else {}),
        **{name: manifest.budget.knobs[name] for name in _BUDGET_KNOBS},
        "training.seq_length": config.training.seq_length,
        "training.global_batch_size": config.training.global_batch_size,
        "encoder": short_digest(repr(sorted(manifest.encoder.items()))),
        **manifest.data,
    }


def _sources(config: DataConfig, fitted: Fitted, arrays: PackArrays) -> list[PlanSource]:
    """The split's sources with the draws that the packs hold of each."""
    starts = fitted.table.source_starts
    owner = np.searchsorted(starts[1:], arrays.numbers, side="right")
    draws = np.bincount(owner, minlength=len(starts) - 1)
    return [
        PlanSource(
            source.name,
            np.flatnonzero(fitted.eligible[starts[d] : starts[d + 1]]).astype(np.int64) + starts[d],
            int(draws[d]),
        )
        for d, source in enumerate(config.sources)
    ]


def check_files(
    manifest: Manifest, folder: Path
) -> tuple[tuple[ShardStamp, ...], dict[str, bytes]]:
    """The folder's tars, and the content of its small files. Tars are checked pack by pack when
    read.

    Raises:
        PacksError: a file is missing or has another size, or a small one other content.
    """
    faults, tars, small = [], {}, {}
    names = {ARRAYS, *([] if manifest.kind == "plan" else [HOLES])}
    names |= {SAMPLES} if manifest.kind == "shards" else set()
    faults += [f"{name}: not listed" for name in sorted(names - manifest.files.keys())]
    for name, expected in sorted(manifest.files.items()):
        path = folder / name
        if not path.is_file():
            faults.append(f"{name}: missing")
        elif isinstance(expected, int):
            size = path.stat().st_size
            if size != expected:
                faults.append(f"{name}: {size} bytes, {expected} were written")
            tars[name] = ShardStamp(str(path), expected, "")
        else:
            small[name] = regular_bytes(path)
            if digest(small[name]) != expected:
                faults.append(f"{name}: not what was written")
    if faults:
        raise _not_as_written(folder, faults)
    return tuple(tars[tar_name(number)] for number in range(len(tars))), small


def _not_as_written(folder: Path, faults: Sequence[str]) -> PacksError:
    return PacksError(
        f"packing.path: {folder} is not as {MANIFEST} describes it:\n{indented(faults)}\n"
        "Copy it again, or pack again."
    )


def _read_holes(folder: Path, data: bytes) -> dict[int, tuple[str, str]]:
    try:
        found = parse_small_json(data).items()
        return {int(number): (name, reason) for number, (name, reason) in found}
    except UNREADABLE as error:
        raise _not_as_written(folder, [f"{HOLES}: {error}"]) from error


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
        by_number: dict[int, Any] = {}
        packs: dict[tuple[str, int], list[SavedSample | None] | DataError] = {}
        for place, ref in enumerate(request.samples):
            if ref.pack is None:
                continue
            name = (ref.pack.stamp.path, ref.pack.offset)
            if name not in packs:
                packs[name] = load_pack(self.packs, ref.pack)
            by_number[place] = or_error(_sample, packs[name], ref)
        anew = [
            place
            for place, ref in enumerate(request.samples)
            if place not in by_number or _wants_images(by_number[place])
        ]
        if anew:
            cooked = self.reader.read_all([request.samples[place] for place in anew])
            for place, sample in zip(anew, cooked, strict=True):
                saved = by_number.get(place)
                if saved is None or isinstance(sample, DataError):
                    by_number[place] = sample
                else:
                    by_number[place] = _with_images(saved, sample.images)
        return [by_number[place] for place in range(len(request.samples))]

    def encode(
        self, ref: SampleRef, reading: Any, owners: SampleOwners | None = None
    ) -> EncodedSample:
        """See BinDataset."""
        if not isinstance(reading, SavedSample):
            return super().encode(ref, reading, owners)
        sizes = None if reading.resized else ref.sizes
        how = (sizes,) if owners is None else (sizes, owners)
        media = self.encoder.pixels(reading.images, *how) if reading.num_images else None
        if self.encoder.settings.pairs and not reading.tokens.sequences:
            raise integrity_error("the pack has one sequence of it, and a pair has two; pack again")
        each = max(1, len(reading.tokens.sequences))  # both sequences of a pair have its images
        expected = 0 if media is None else sum(media.num_tokens) * each
        saved = reading.tokens.media_positions.shape[0]
        if expected != saved:
            raise integrity_error(
                f"its images make {expected} image tokens, the pack has {saved}; the image "
                "processor changed, or the images"
            )
        return replace(reading.tokens, key=ref.key, media=media)


def load_pack(fetcher: LocalFetcher, pack: PackPlace) -> list[SavedSample | None] | DataError:
    """A pack's samples, or why it cannot be used."""
    try:
        span = fetcher.read(pack.stamp, pack.offset, pack.length)
        crc32 = zlib.crc32(span)
        if crc32 != pack.crc32:
            raise integrity_error(
                f"the pack at byte {pack.offset} of {pack.stamp.path} is damaged: its checksum is "
                f"{crc32:08x}, {pack.crc32:08x} was written"
            )
        return read_pack(span, shard=pack.stamp.path, offset=pack.offset)
    except DataError as error:
        return error


def _sample(pack: list[SavedSample | None] | DataError, ref: SampleRef) -> SavedSample:
    SampleReader.raise_known(ref)
    assert ref.pack is not None
    if isinstance(pack, DataError):
        raise _located(pack, ref, ref.pack)
    saved = pack[ref.pack.place] if ref.pack.place < len(pack) else None
    if saved is None:
        missing = integrity_error(
            f"{ref.pack.stamp.path} has no tokens of it at byte {ref.pack.offset}"
        )
        raise _located(missing, ref, ref.pack)
    return saved


def _located(error: DataError, ref: SampleRef, pack: PackPlace) -> DataError:
    """What is wrong with a pack, as one of its samples has it."""
    path = pack.stamp.path
    return ref.located(DataError(error.reason, error_class=error.error_class, file=path))


def _wants_images(item: SavedSample | DataError) -> bool:
    return isinstance(item, SavedSample) and item.num_images > len(item.images)


def _with_images(saved: SavedSample, images: tuple[bytes, ...]) -> SavedSample | DataError:
    if len(images) != saved.num_images:
        return integrity_error(
            f"the pack was made from {saved.num_images} images, the shard has {len(images)}"
        )
    return replace(saved, images=images)
