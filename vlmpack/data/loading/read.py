"""From a sample's place in a shard to its verified conversation and images.

A byte range is checked for length and CRC, split into members, and read as a VLMSample. A record of
another file comes by its own reader, and its checksum is that of its members. A failure is a
DataError of one class. The policy for that class says whether it ends the run or leaves a hole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from vlmpack.addresses import is_remote, registered_name
from vlmpack.data.files.registered import REMEDY
from vlmpack.data.files.samples import RecordFiles, place_of_key
from vlmpack.data.files.shard_samples import verified_sample
from vlmpack.data.index.table import SampleRef
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.data.shards.samples import REINDEX, RawSample, changed_since_indexed, cook
from vlmpack.data.shards.turns import record_key
from vlmpack.encode.sample import VLMSample
from vlmpack.errors import DataError, ErrorClass, integrity_error, or_error, or_raise
from vlmpack.storage.fetch import Fetcher, ShardStamp, at_once

SHARDS_AT_ONCE = 16
"""Remote shards of one bin that are read at the same time."""


NOT_READ, ALL_IMAGES = -1, 1 << 31
"""How far a sample came: before its first image, an image's number, or behind its last. Processes
that open different images of a sample report the fault that came first."""


@dataclass(frozen=True, slots=True)
class SkippedSample:
    """A hole: a sample that the plan has and the batch has not.

    Args:
        file: what is damaged, where that is not the shard: the tar of a saved pack.
        met: how far the sample had come, of what comes one after the other: see `NOT_READ`.
    """

    number: int
    key: str
    shard: str
    offset: int
    error_class: ErrorClass
    reason: str
    file: str | None = None
    met: int = field(default=NOT_READ, compare=False)

    @classmethod
    def from_error(
        cls, ref: SampleRef, error: DataError, *, was_read: bool = False
    ) -> SkippedSample:
        """The hole that an error leaves in place of a sample, whose bytes and text may have been
        read."""
        met = NOT_READ
        if was_read:
            met = ALL_IMAGES if error.image is None else error.image
        place = (ref.number, ref.key, ref.shard, ref.offset)
        return cls(*place, error.error_class, error.reason, error.file, met)

    def to_error(self) -> DataError:
        """The error, with its place."""
        error = DataError(self.reason, error_class=self.error_class, file=self.file)
        return error.located(key=self.key, shard=self.shard, offset=self.offset)


@dataclass(frozen=True, slots=True)
class SampleReader:
    """Reads samples by their place; picklable, one copy in each worker.

    Args:
        fetcher: reads byte ranges; opens its own files after it was sent to a worker.
    """

    fetcher: Fetcher
    caps: SampleCaps = field(default_factory=SampleCaps)
    each_answer: bool = False
    files: RecordFiles = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", RecordFiles(self.fetcher, self.caps))

    def read(self, ref: SampleRef) -> VLMSample:
        """One sample, verified against the index and cooked.

        Raises:
            DataError: class `transport`, `integrity` or `schema`, with key, shard and offset; also
                for a sample that the index already knows to be bad.
        """
        return self._cooked(ref, or_error(self.read_raw, ref))

    def _cooked(self, ref: SampleRef, raw: RawSample | DataError) -> VLMSample:
        try:
            return cook(or_raise(raw), ref.branch, each_answer=self.each_answer)
        except DataError as error:
            raise ref.located(error) from None

    def read_all(self, refs: Sequence[SampleRef]) -> list[VLMSample | DataError]:
        """The samples of a bin, in order; a failure is an error in its place.

        The ranges of all remote shards are requested at the same time.
        """
        return [or_error(self._cooked, *each) for each in zip(refs, self._raws(refs), strict=True)]

    def read_raw(self, ref: SampleRef) -> RawSample:
        """The sample's members, their bytes verified.

        Raises:
            DataError: class `transport` or `integrity`; of a record, what is wrong with it.
        """
        self.raise_known(ref)
        if ref.stamp.holds_records:
            [raw] = self._records(ref.stamp, [ref])
            return or_raise(raw)
        return self._verified(ref, self.fetcher.read(ref.stamp, ref.offset, ref.length))

    def _raws(self, refs: Sequence[SampleRef]) -> Iterator[RawSample | DataError]:
        """What `read_raw` returns or raises, of each."""
        records: dict[ShardStamp, dict[tuple[int, int], SampleRef]] = {}
        is_record = [ref.stamp.holds_records for ref in refs]
        spans = iter(self._spans([r for r, held in zip(refs, is_record, strict=True) if not held]))
        for ref, held in zip(refs, is_record, strict=True):
            if ref.reason is None and held:  # branches are read once
                records.setdefault(ref.stamp, {}).setdefault((ref.offset, ref.row), ref)
        read = {
            stamp: dict(zip(numbers, self._records(stamp, list(numbers.values())), strict=True))
            for stamp, numbers in records.items()
        }

        def sample(ref: SampleRef, held: bool) -> RawSample:
            if held:
                self.raise_known(ref)
                return or_raise(read[ref.stamp][ref.offset, ref.row])
            return self._verified(ref, or_raise(next(spans)))

        yield from (or_error(sample, *each) for each in zip(refs, is_record, strict=True))

    def _records(self, stamp: ShardStamp, refs: Sequence[SampleRef]) -> list[RawSample | DataError]:
        """Samples of a file that is no shard, verified."""
        places = [
            place_of_key(record_key(ref.key, ref.branch), ref.offset, ref.length, ref.row)
            for ref in refs
        ]
        found = self.files.read(stamp, places, [ref.images for ref in refs])
        for place, (ref, raw) in enumerate(zip(refs, found, strict=True)):
            if isinstance(raw, DataError) or raw.crc32 == ref.crc32:
                continue
            remedy = REINDEX if registered_name(stamp.path) is None else REMEDY
            found[place] = changed_since_indexed(raw.crc32, ref.crc32, remedy)
            if raw.fault is not None:
                reason = f"{raw.fault}; when it was indexed it was good: {remedy}"
                found[place] = integrity_error(reason)
        return found

    def _verified(self, ref: SampleRef, span: bytes) -> RawSample:
        raw = verified_sample(self.fetcher, span, ref.stamp, ref.offset, ref.crc32, self.caps)
        if raw.key != record_key(ref.key, ref.branch):
            raise integrity_error(f"the byte range holds the sample {raw.key!r}")
        return raw

    def _spans(self, refs: Sequence[SampleRef]) -> list[bytes | DataError]:
        spans: dict[int, bytes | DataError] = {}
        remote: dict[ShardStamp, list[int]] = {}
        first: dict[tuple[ShardStamp, int, int], int] = {}
        for place, ref in enumerate(refs):
            try:
                self.raise_known(ref)
                if first.setdefault((ref.stamp, ref.offset, ref.length), place) != place:
                    continue  # of a record that is read already: its branches have one span
                if is_remote(ref.shard):
                    remote.setdefault(ref.stamp, []).append(place)
                else:
                    spans[place] = self.fetcher.read(ref.stamp, ref.offset, ref.length)
            except DataError as error:
                spans[place] = error

        def ask(stamp: ShardStamp) -> Iterable[tuple[int, bytes | DataError]]:
            return self._spans_of(stamp, remote[stamp], refs)

        for some in at_once(ask, list(remote), most=SHARDS_AT_ONCE):
            spans.update(some)
        return [
            spans[place] if place in spans else spans[first[ref.stamp, ref.offset, ref.length]]
            for place, ref in enumerate(refs)
        ]

    def _spans_of(
        self, stamp: ShardStamp, places: Sequence[int], refs: Sequence[SampleRef]
    ) -> Iterable[tuple[int, bytes | DataError]]:
        try:
            ranges = [(refs[place].offset, refs[place].length) for place in places]
            return zip(places, self.fetcher.read_ranges(stamp, ranges), strict=True)
        except DataError as error:
            return [(place, error) for place in places]

    @staticmethod
    def raise_known(ref: SampleRef) -> None:
        """Raises what the index or the lengths already found wrong with a sample.

        Raises:
            DataError: with key, shard and offset.
        """
        if ref.reason is not None and ref.error_class is not None:
            known = DataError(ref.reason, error_class=_error_class(ref.error_class))
            raise ref.located(known)


def _error_class(name: str) -> ErrorClass:
    match name:
        case "transport" | "integrity" | "decode" | "schema" | "too_long":
            return name
    raise AssertionError(f"unknown error class {name!r} in the index")
