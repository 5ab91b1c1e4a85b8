"""A split as the pipeline uses it: all indexed before the plan, or indexed during the run.

A launch encodes a few samples and compares their lengths with the predicted ones.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Protocol

import numpy as np
import PIL

from vlmpack.data.config import DataConfig
from vlmpack.data.index.columns_file import Numbers
from vlmpack.data.index.table import Fitted, Int64s, SampleRef, chosen
from vlmpack.data.index.table_file import LARGE
from vlmpack.data.loading.read import SampleReader, SkippedSample
from vlmpack.data.plan.batches import Cursors, Plan, PlannedBatch, Position
from vlmpack.data.plan.packers import Bin, PlannedSamples, planned_samples
from vlmpack.data.plan.packs import PackArrays, PackPlan
from vlmpack.data.plan.state import DataState, Identity
from vlmpack.data.plan.windows import WindowPlan
from vlmpack.data.splits.summary import DataSummary, EpochLength, summarise
from vlmpack.encode import Encoder
from vlmpack.encode.coordinates import Doubts, doubt_lines, note_doubt
from vlmpack.errors import DataError, integrity_error
from vlmpack.model_folder.load import made_with
from vlmpack.version import __version__

logger = logging.getLogger("vlmpack")

PROBE_SECONDS = 3.0
MIN_PROBED = 16


def probed_samples(fitted: Fitted, count: int) -> list[SampleRef]:
    """A few good samples, spread over the split, and some of those that the plan shrank."""
    usable = chosen(fitted.eligible & ~fitted.table.bad)
    size = usable.shape[0]
    places = np.linspace(0, size - 1, num=min(count, size)).astype(np.int64)
    spread = usable[places].tolist()
    return [fitted.table.ref(n) for n in sorted({*spread, *list(fitted.table.shrunk)[:count]})]


def probed_mark(folder: Path, identity: Identity) -> Path:
    """The file that says that a launch has compared the lengths of this very split.

    It is an empty file beside the index. Its name stands for the samples, the lengths, the encoder,
    and the versions of what encodes.
    """
    versions = [PIL.__version__, *(metadata.version(name) for name in ("jinja2", "tokenizers"))]
    text = json.dumps([identity, made_with(), versions, __version__], sort_keys=True)
    return folder / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.probed"


def probe_lengths(
    config: DataConfig, refs: Sequence[SampleRef], reader: SampleReader, encoder: Encoder
) -> int:
    """Encode some samples and compare with the predicted lengths.

    It ends after PROBE_SECONDS, having compared at least MIN_PROBED. Large images take long, and
    the loader compares every sample again.

    Returns:
        How many were compared, without bad ones that the policy skips.

    Raises:
        DataError: the first sample whose encoded length is not the predicted one; or one that is
            bad, where its class is not skipped.
    """
    doubts: Doubts = {}
    compared, deadline = 0, time.monotonic() + PROBE_SECONDS
    stride = -(-len(refs) // MIN_PROBED) or 1
    for ref in (ref for start in range(stride) for ref in refs[start::stride]):
        if compared >= MIN_PROBED and time.monotonic() > deadline:
            break
        try:
            sample = reader.read(ref)
            encoded = encoder.encode(sample, ref.sizes)
            note_doubt(doubts, encoder.doubt(sample, ref.sizes), ref.key)
        except DataError as error:
            if config.data.on_error.skips(error.error_class):
                continue
            raise ref.located(error) from None
        compared += 1
        if encoded.length != ref.num_tokens:
            raise integrity_error(
                f"the length probe predicted {ref.num_tokens} tokens, encoding gave "
                f"{encoded.length}; the model family's length rule does not fit this processor",
                key=ref.key,
                shard=ref.shard,
                offset=ref.offset,
            )
    for line in doubt_lines(doubts, compared):
        logger.warning("note: of those that a launch looks at, %s", line)
    return compared


SUMMARY_SAMPLES = 262_144
"""Samples of an epoch that are packed for its figures at most: some 2 s."""

OnDropped = Callable[[Sequence[SkippedSample]], None]


class Split(Protocol):
    """The interface of a split for the pipeline."""

    @property
    def plan(self) -> Plan | WindowPlan | PackPlan:
        """The plan of the split's global batches."""

    @property
    def identity(self) -> Identity:
        """What decides its order."""

    @property
    def fitted(self) -> Fitted:
        """All its samples, numbered from 0 in index order."""

    def start(self, epoch: int = 0, first_pass: int = 0) -> Cursors:
        """The cursors of an epoch's first window. `first_pass` counts where shards are indexed
        during the run."""

    def ref(self, number: int) -> SampleRef:
        """What a worker needs of a sample, by its number in the plan."""

    def refs(self, samples: Bin) -> tuple[SampleRef, ...]:
        """What a worker needs of the samples of a bin of the plan."""

    def sizes(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """(n,) tokens and (n,) vision patches of samples."""

    def sequence_tokens(self, numbers: Int64s) -> Int64s:
        """(n, k) tokens of each sequence of samples: 2 of a pair, else 1."""

    @property
    def planned(self) -> PlannedSamples | None:
        """The planned sizes of samples, if rows share prefixes."""

    def places(self, numbers: Int64s) -> Int64s:
        """(n,) where samples stand in `fitted`, by their number in the plan."""

    def pass_bins(self, places: Sequence[int], each: int) -> list[Bin]:
        """Bins for one pass over `places` in `fitted`: `each` samples to a bin, unless packs are
        saved."""

    def fitted_ref(self, place: int) -> SampleRef:
        """What a worker needs of a sample, by its place in `fitted`."""

    def sources(self, numbers: Int64s) -> Int64s:
        """(n,) the place of each sample's source in the recipe's list."""

    def epoch_length(self) -> EpochLength:
        """How long an epoch is, as far as that is known."""

    def steps_until(self, epochs: int, state: DataState) -> int:
        """Global batches from a state to the end of the last of `epochs` epochs; 0 or less behind
        it."""

    def numbers(self) -> Sequence[tuple[str, Numbers]]:
        """(name, usable samples by their number in the plan) of each source, all indexed."""

    def index_all(self) -> None:
        """Indexes what is not indexed yet, so that `epoch_length` is exact."""

    def usable_sizes(self) -> Iterator[tuple[Int64s, Int64s]]:
        """(n,) tokens and (n,) vision patches of the usable samples that are known, by spans."""

    def probed(self, count: int, state: DataState) -> list[SampleRef]:
        """A few samples whose predicted lengths are worth a check."""

    def summary(self) -> DataSummary:
        """The figures of the split."""

    def close(self) -> None:
        """Ends what works in the background."""


@dataclass(frozen=True)
class KnownSplit:
    """A split whose samples are all known before the plan is made."""

    config: DataConfig
    fitted: Fitted
    identity: Identity
    plan: Plan | PackPlan

    def start(self, epoch: int = 0, first_pass: int = 0) -> Cursors:
        """See Split."""
        return self.plan.cursors(epoch, 0)

    def ref(self, number: int) -> SampleRef:
        """See Split."""
        return self.fitted.table.ref(number)

    def refs(self, samples: Bin) -> tuple[SampleRef, ...]:
        """See Split."""
        return tuple(self.ref(number) for number in samples)

    def sizes(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """See Split."""
        return self.fitted.table.sizes(numbers)

    def sequence_tokens(self, numbers: Int64s) -> Int64s:
        """See Split."""
        return self.fitted.table.sequence_tokens(numbers)

    @property
    def planned(self) -> PlannedSamples | None:
        """See Split."""
        table = self.fitted.table
        return None if table.prefixes is None else partial(planned_samples, table)

    def places(self, numbers: Int64s) -> Int64s:
        """See Split."""
        return numbers

    def pass_bins(self, places: Sequence[int], each: int) -> list[Bin]:
        """See Split."""
        return consecutive_bins(places, each)

    def fitted_ref(self, place: int) -> SampleRef:
        """See Split: their numbers in the plan are their places."""
        return self.ref(place)

    def sources(self, numbers: Int64s) -> Int64s:
        """See Split."""
        return self.fitted.table.sources(numbers)

    def epoch_length(self) -> EpochLength:
        """See Split."""
        return EpochLength(self.plan.epoch_size, self.plan.num_steps(0), exact=True)

    def steps_until(self, epochs: int, state: DataState) -> int:
        """See Split."""
        return self.plan.steps_until(epochs, state.position)

    def numbers(self) -> Sequence[tuple[str, Numbers]]:
        """See Split."""
        return [(source.name, source.numbers) for source in self.plan.sources]

    def index_all(self) -> None:
        """See Split."""

    def usable_sizes(self) -> Iterator[tuple[Int64s, Int64s]]:
        """See Split."""
        return self.fitted.sizes()

    def probed(self, count: int, state: DataState) -> list[SampleRef]:
        """See Split."""
        return probed_samples(self.fitted, count)

    def summary(self) -> DataSummary:
        """See Split. Planned rows of a long epoch, and steps that depend on them, are taken from
        its first window. So are the others from LARGE samples on."""
        plan = self.plan
        packs = self.config.mode.facts.plans_rows and not self.config.mode.facts.reads_packs
        whole = plan.epoch_size <= (SUMMARY_SAMPLES if packs else LARGE)
        rows = PackArrays.of(plan.first_epoch(None if whole else 1))
        if whole or plan.packer.num_batches(1) is not None:
            epoch = self.epoch_length()
        else:
            num_rows = plan.epoch_size * rows.num_packs / rows.numbers.size
            steps = max(1, round(num_rows / self.config.training.global_batch_size))
            epoch = EpochLength(plan.epoch_size, steps, exact=False)
        return summarise(
            [self.fitted],
            num_shards=len(self.fitted.table.shards),
            epoch=epoch,
            tokens=self.sequence_tokens(rows.numbers),
            bins=rows.sizes,
        )

    def close(self) -> None:
        """See Split."""


def consecutive_bins(samples: Sequence[int], each: int) -> list[Bin]:
    """Samples in their order, so many to a bin; the last may be short."""
    return [tuple(samples[at : at + each]) for at in range(0, len(samples), each)]


def first_epoch(split: Split) -> Iterator[PlannedBatch]:
    """The global batches of epoch 0, planned as they are asked for."""
    for batch in split.plan.walk(Position(), split.start()):
        if batch.position.epoch:
            return
        yield batch
        if batch.following.epoch:
            return
