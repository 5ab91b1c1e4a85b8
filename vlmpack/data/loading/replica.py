"""The processes of a replica agree on their micro-batches before they train them.

Each process reads the plan's bins itself, and encodes all texts and its own images. No part of a
sample travels between processes, so one may meet a fault that others do not, such as a damaged
image or a store that fails. Before a step each process sends one number:

    vote      8 bytes from each process to each: a digest of the step's rows and holes, or a fault
    all same  the step is trained; almost always
    else      each sends its holes, or what ended its reader. A hole of one is a hole of all.
              Processes that had the sample load that bin again without it, and all vote again.
              An error whose class is not skipped, and any other fault, is raised by all

A single process does not vote.
"""

from __future__ import annotations

import hashlib
import pickle
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, NamedTuple, NoReturn, TypeVar

import torch

from vlmpack.activity import ACTIVITY
from vlmpack.data.loading.loader import (
    BinDataset,
    BinRequest,
    Loaded,
    MicroBatch,
    WorkerSettings,
    start_bins,
)
from vlmpack.data.loading.read import SkippedSample
from vlmpack.distributed import Ranks
from vlmpack.errors import DataError, VlmpackError, integrity_error
from vlmpack.packing.image_owners import RowOwners, turns_of
from vlmpack.recipe.data import DataSection, OnErrorSection

Item = TypeVar("Item")
CLOSE_SECONDS = 5.0
"""How long an item in progress may still take when it is no longer needed."""
END, FAULT = 0, 1
"""Votes that are no digest."""
Load = Callable[[BinRequest], Loaded]
Steps = Iterator[Sequence[BinRequest]]
"""The bins of each step."""
AddColumns = Callable[[MicroBatch], MicroBatch]
"""What a process adds to a micro-batch that its workers do not know."""
Holes = dict[int, SkippedSample]


class LoadedBin(NamedTuple):
    """A bin with its micro-batch, or with the sample whose error ends the run."""

    request: BinRequest
    result: Loaded

    @property
    def planned(self) -> tuple[int, ...]:
        """The numbers of its samples."""
        return tuple(ref.number for ref in self.request.samples)

    @property
    def holes(self) -> tuple[SkippedSample, ...]:
        """The samples that this process cannot use, or the first that ends the run."""
        return (self.result,) if isinstance(self.result, SkippedSample) else self.result.skipped


@dataclass(frozen=True, slots=True)
class Report:
    """What a process says of a step where not all votes are the same.

    Args:
        fault: what ended its reader; None for nothing.
        bins: numbers of the samples of each bin, as it plans them; empty behind the last step.
        holes: of each bin.
    """

    who: str
    fault: Exception | None
    bins: tuple[tuple[int, ...], ...]
    holes: tuple[tuple[SkippedSample, ...], ...]


def start_steps(
    dataset: BinDataset,
    steps: Steps,
    data: DataSection,
    settings: WorkerSettings,
    ranks: Ranks,
    *,
    add_columns: AddColumns | None = None,
    ahead: bool = False,
) -> Generator[list[MicroBatch]]:
    """The micro-batches of each step, with the same samples on every process of the replica.

    Workers are at work when this returns, and end when it is closed. Taking a step is collective.

    Args:
        add_columns: adds columns to each micro-batch before the vote, or None.
        ahead: whether processes agree on a step while the one before is trained, in a thread and a
            group of its own. At most one such iterator at a time.

    Raises:
        DataError: a bad sample of any process, if its class is not skipped. Processes that plan or
            make different rows. What `start_bins` raises in any process.
    """
    ahead = ahead and ranks.replica_size > 1
    agreed = _agreed_steps(
        dataset, steps, data, settings, ranks.ahead if ahead else ranks, add_columns
    )
    next(agreed)  # its empty item: the workers are at work
    return one_ahead(agreed) if ahead else agreed


def _agreed_steps(
    dataset: BinDataset,
    steps: Steps,
    data: DataSection,
    settings: WorkerSettings,
    ranks: Ranks,
    add_columns: AddColumns | None,
) -> Generator[list[MicroBatch]]:
    """First an empty item, once the workers are at work; then the micro-batches of each step."""
    coming: deque[Sequence[BinRequest]] = deque()

    def requests() -> Iterator[BinRequest]:
        for number, step in enumerate(steps):
            coming.append(with_owners(step, ranks, number))
            yield from coming[-1]

    def with_columns(loaded: Loaded) -> Loaded:
        if add_columns is None or isinstance(loaded, SkippedSample):
            return loaded
        return add_columns(loaded)

    def load(request: BinRequest) -> Loaded:
        return with_columns(dataset.load(request))

    bins = _or_fault(partial(start_bins, dataset, requests(), data, settings), ranks)
    try:
        yield []
        while True:
            step: list[LoadedBin] | None = None
            fault: Exception | None = None
            try:
                filled = map(with_columns, bins)
                step = _next_step(filled, coming, is_alone=ranks.replica_size == 1)
            except Exception as error:
                if ranks.replica_size == 1:
                    raise
                fault = error
            if ranks.replica_size > 1:
                # Not as an item: the training thread may be at work on something else.
                step = agreed_step(step, fault, ranks, load, data.on_error)
            if step is None:
                return
            yield [_micro_batch(loaded) for loaded in step]
    finally:
        bins.close()


def _or_fault(open_stream: Callable[[], Generator[Loaded]], ranks: Ranks) -> Generator[Loaded]:
    """What `open_stream` makes. In a replica of several processes its error is raised with the
    first bin, so that all get it."""
    try:
        return open_stream()
    except Exception as error:
        if ranks.replica_size == 1:
            raise
        return _raising(error)


def _raising(error: Exception) -> Generator[Loaded]:
    raise error
    yield


def _next_step(
    bins: Iterator[Loaded], coming: deque[Sequence[BinRequest]], *, is_alone: bool
) -> list[LoadedBin] | None:
    """All bins of a step; None behind the last one."""
    step: list[LoadedBin] = []
    for item in bins:
        if is_alone and isinstance(item, SkippedSample):
            raise item.to_error()
        step.append(LoadedBin(coming[0][len(step)], item))
        if len(step) == len(coming[0]):
            coming.popleft()
            return step
    return None


def with_owners(step: Sequence[BinRequest], ranks: Ranks, number: int) -> Sequence[BinRequest]:
    """A step's bins with this process's part of each row's images. `number` rotates rows of one
    image."""
    size = ranks.stage_size
    if ranks.replica_size == 1:
        return step
    patches = [sum(ref.num_patches for ref in request.samples) for request in step]
    return [
        replace(request, row=RowOwners(ranks.image_rank, size, (turn + number) % size))
        for request, turn in zip(step, turns_of(patches, size), strict=True)
    ]


def raise_in_replica(error: Exception, ranks: Ranks) -> NoReturn:
    """Raise what ended this process before its first step of training, on all of its replica.

    Raises:
        Exception: the error.
    """
    if ranks.replica_size > 1:
        _all_say(FAULT, ranks.ahead)
        raise_faults(_exchange(None, error, ranks.ahead))
    raise error


def agreed_step(
    step: list[LoadedBin] | None,
    fault: Exception | None,
    ranks: Ranks,
    load: Load,
    policy: OnErrorSection,
) -> list[LoadedBin] | None:
    """A step as all processes of the replica have it; None behind the last one. Collective.

    Raises:
        DataError: as `start_steps`.
        Exception: what ended the reader of one of them.
    """
    while not _all_say(vote_of(step, fault), ranks):
        reports = _exchange(step, fault, ranks)
        raise_faults(reports)
        assert step is not None
        union = union_of(reports)
        for hole in first_to_last(union, reports[0].bins):
            if not policy.skips(hole.error_class):
                raise hole.to_error()
        if all(each.holes == reports[0].holes for each in reports):
            raise integrity_error(
                f"the {ranks.replica_size} processes of a replica made different rows of the same "
                "samples. Expected the same tokens. Compare the versions of tokenizers, "
                "transformers and Pillow on their machines"
            )
        try:
            step = [_without(loaded, union, load) for loaded in step]
        except Exception as error:
            fault = error
    return step


def vote_of(step: Sequence[LoadedBin] | None, fault: Exception | None) -> int:
    """What a process votes for a step."""
    if fault is not None:
        return FAULT
    if step is None:
        return END
    digest = hashlib.blake2b(digest_size=8)
    for loaded in step:
        if isinstance(loaded.result, SkippedSample):
            return FAULT
        said = [(hole.number, hole.error_class, hole.reason) for hole in loaded.holes]
        digest.update(repr((loaded.planned, loaded.result.digest, said)).encode())
    return max(FAULT + 1, int.from_bytes(digest.digest(), "little") >> 1)


def _all_say(vote: int, ranks: Ranks) -> bool:
    """Whether all processes have the same step, whole."""
    with ACTIVITY.waiting(lambda: "waiting for its replica's processes to have read the step"):
        try:
            votes = ranks.gather_in_replica(torch.tensor([vote]))
        except RuntimeError as error:  # torch's, of a lost connection or the group's timeout
            raise VlmpackError(
                f"the {ranks.replica_size} processes of a replica could not agree on the rows of a "
                f"step: {error}. One of them has ended or hangs. Look at what each said last. "
                "parallelism.step_timeout_seconds is how long they wait for one another"
            ) from error
    return vote != FAULT and all(int(each) == vote for each in votes)


def _exchange(step: list[LoadedBin] | None, fault: Exception | None, ranks: Ranks) -> list[Report]:
    loaded = step or []
    report = Report(
        f"rank {ranks.rank} on {socket.gethostname()}",
        _picklable(fault),
        tuple(each.planned for each in loaded),
        tuple(each.holes for each in loaded),
    )
    return ranks.gather_objects_in_replica(report)


def _picklable(fault: Exception | None) -> Exception | None:
    """The error, or one that says the same where it cannot travel."""
    try:
        pickle.dumps(fault)
        return copy(fault)  # made anew from its parts, as the others would
    except Exception:
        return VlmpackError(f"{type(fault).__name__}: {fault}")


def raise_faults(reports: Sequence[Report]) -> None:
    """Raise what ended a reader, on all processes alike.

    Raises:
        Exception: the first process's that has one; a DataError's words, or a note of any other,
            say which process it is.
        DataError: the processes planned different steps.
    """
    says_more = len({repr(each.fault) for each in reports}) > 1
    for place, each in enumerate(reports):
        who = f"process {place} of the {len(reports)} that train these rows together ({each.who})"
        if isinstance(each.fault, DataError) and says_more:
            raise each.fault.reworded(f"{who}: {each.fault.reason}") from each.fault
        if each.fault is not None:
            if says_more:
                each.fault.add_note(f"met by {who}")
            raise each.fault
    plans = {each.bins for each in reports}
    if len(plans) > 1:
        raise integrity_error(
            f"the {len(reports)} processes of a replica planned different steps, of "
            f"{[sum(map(len, each.bins)) for each in reports]} samples. Expected the same: do all "
            "see the same shards and the same data.index_dir?"
        )


def union_of(reports: Sequence[Report]) -> Holes:
    """The holes of a step. If several processes report a sample, the fault met first counts."""
    union: Holes = {}
    for each in reports:
        for hole in (hole for holes in each.holes for hole in holes):
            known = union.get(hole.number)
            if known is None or hole.met < known.met:
                union[hole.number] = hole
    return union


def first_to_last(holes: Holes, bins: Sequence[Sequence[int]]) -> list[SkippedSample]:
    """Holes in the order of the plan."""
    return [holes[number] for samples in bins for number in samples if number in holes]


def _without(loaded: LoadedBin, union: Holes, load: Load) -> LoadedBin:
    """A bin without the samples that any process cannot use, loaded again if it has one of them."""
    holes = tuple(first_to_last(union, [loaded.planned]))
    own = {hole.number for hole in loaded.holes}
    if isinstance(loaded.result, MicroBatch) and own == {hole.number for hole in holes}:
        return loaded._replace(result=replace(loaded.result, skipped=holes))
    request = replace(loaded.request, holes=holes)
    return LoadedBin(request, load(request))


def _micro_batch(loaded: LoadedBin) -> MicroBatch:
    if isinstance(loaded.result, SkippedSample):
        raise loaded.result.to_error()
    return loaded.result


def one_ahead(items: Generator[Item]) -> Generator[Item]:
    """The items, each made while the one before is used.

    Once the first is taken, exactly one item is in progress. So processes that take equally many
    also make equally many. `items` is closed with this one, unless an item takes over
    CLOSE_SECONDS; then the end of the process ends it.
    """
    coming = _Next(items)
    try:
        while True:
            coming.join()
            if coming.error is not None:
                raise coming.error
            if not coming.found:
                return
            (item,) = coming.found
            coming = _Next(items)
            yield item
    finally:
        coming.join(CLOSE_SECONDS)
        if not coming.is_alive():
            items.close()


class _Next(threading.Thread, Generic[Item]):
    """One item in progress, in a daemon thread, since what it waits for may never come."""

    def __init__(self, items: Generator[Item]) -> None:
        super().__init__(name="vlmpack-ahead", daemon=True)
        self.items = items
        self.found: list[Item] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Make it."""
        try:
            self.found.extend(self._one())
        except BaseException as error:  # left out, one that is no Exception would be the data's end
            self.error = error

    def _one(self) -> list[Item]:
        for item in self.items:
            return [item]
        return []
