"""The processes of a replica read a plan each by itself, and train the same rows of it.

The processes of a replica played by threads: what one says, all hear.
"""

from __future__ import annotations

import math
import pickle
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from support.pairs import raw_pairs, write_pairs
from support.shard_fakes import chat_json, image_bytes, open_data, write_shard
from support.shards import TINY_MODEL

from vlmpack.data.loading import replica as replica_module
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.loading.loader import BinDataset, GlobalStep
from vlmpack.data.pipeline import TrainData
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.errors import DataError, ReferenceCacheError, VlmpackError
from vlmpack.recipe.data import OnErrorSection

Result = TypeVar("Result")


@dataclass
class Table:
    """Where they meet.

    Args:
        size: how many.
        seconds: the longest wait for the others.
    """

    size: int
    seconds: float = 60.0
    barrier: threading.Barrier = field(init=False)
    said: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=self.seconds)
        self.said = [None] * self.size

    def gather(self, rank: int, value: bytes) -> list[bytes]:
        """What all said."""
        self.said[rank] = value
        self.barrier.wait()
        found = [*self.said]
        self.barrier.wait()
        return found


@dataclass(frozen=True, kw_only=True)
class PlayedRanks(Ranks):
    """One of them; counts what it sends to each of the others.

    Args:
        table: where they meet.
        votes: bytes of each vote.
        told: bytes of all that was told beside.
    """

    table: Table
    votes: list[int] = field(default_factory=list)
    told: list[int] = field(default_factory=list)

    @property
    def ahead(self) -> PlayedRanks:
        """Itself: one iterator at a time here."""
        return self

    def gather_in_replica(self, values: Any) -> list[Any]:
        """See Ranks."""
        self.votes.append(values.numel() * values.element_size())
        return [pickle.loads(each) for each in self.table.gather(self.rank, pickle.dumps(values))]

    def gather_objects_in_replica(self, value: Any) -> list[Any]:
        """See Ranks."""
        data = pickle.dumps(value)
        self.told.append(len(data))
        return [pickle.loads(each) for each in self.table.gather(self.rank, data)]


def replica(size: int, *, stages: int = 1, seconds: float = 60.0) -> list[PlayedRanks]:
    """All processes of a replica.

    Args:
        size: how many.
        stages: PP.
        seconds: the longest wait for the others.
    """
    table = Table(size, seconds)
    return [
        PlayedRanks(
            rank=rank,
            world_size=size,
            replica_rank=rank,
            replica_size=size,
            stage_size=size // stages,
            table=table,
        )
        for rank in range(size)
    ]


def in_threads(
    all_ranks: list[PlayedRanks], work: Callable[[PlayedRanks], Result]
) -> list[Result | Exception]:
    """What each does, or raises."""

    def attempt(ranks: PlayedRanks) -> Result | Exception:
        try:
            return work(ranks)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(all_ranks)) as pool:
        return list(pool.map(attempt, all_ranks))


pytestmark = pytest.mark.slow

COUNT, STEPS = 12, 3
SIDES = (28, 56, 84, 112)
SKIP = OnErrorSection(transport="skip", integrity="skip", decode="skip", schema="raise")
Damage = Callable[[int, int, bytes], bytes]
"""(sample, image, file) -> the file as it lies in the shard."""

VLM = Encoder(TINY_MODEL)


def write(folder: Path, damage: Damage = lambda sample, image, data: data) -> str:
    """Samples of 0 to 3 images of various sizes."""
    samples = []
    for number in range(COUNT):
        files = {
            f"{n}.jpg": damage(
                number,
                n,
                image_bytes(
                    SIDES[(number + n) % 4], SIDES[number % 3], seed=9 * number + n, kind="JPEG"
                ),
            )
            for n in range(number % 4)
        }
        text = chat_json(f"What is {number}?", f"It is {number}.", number % 4)
        samples.append((f"s{number:03d}", {"json": text, **files}))
    return str(write_shard(folder / "s-0000.tar", samples))


def opened(pattern: str, index: Path, **more: Any) -> TrainData:
    sizes = {"micro_batch_size": 4, "global_batch_size": 8, "num_probed": 0, "on_error": SKIP}
    return open_data(pattern, index, **({"encoder": VLM} | sizes | more))


def steps_of(data: TrainData, ranks: Any = None, steps: int = STEPS) -> list[GlobalStep]:
    more = {} if ranks is None else {"replica": ranks}
    return list(data.batches(data.start(), rank=0, dp=1, max_steps=steps, **more))


def together(
    tmp_path: Path, pattern: str, all_ranks: Sequence[PlayedRanks], **more: Any
) -> tuple[list[Any], list[Ledger]]:
    """The steps of each process, or what it raises; and its ledger."""
    ledgers = [Ledger(None) for _ in all_ranks]

    def read(ranks: PlayedRanks) -> list[GlobalStep]:
        data = opened(pattern, tmp_path / "index", ledger=ledgers[ranks.rank], **more)
        return steps_of(data, ranks)

    return in_threads(list(all_ranks), read), ledgers


def assert_one_row(alone: list[GlobalStep], found: list[list[GlobalStep]]) -> None:
    """Everywhere the rows of one process, whose pixels are somewhere, once."""
    for place, step in enumerate(alone):
        others = [steps[place] for steps in found]
        for other in others:
            assert (other.batch, other.epoch, other.state) == (step.batch, step.epoch, step.state)
            assert other.skipped == step.skipped
        for n, micro in enumerate(step.micro_batches):
            theirs = [other.micro_batches[n] for other in others]
            for one in theirs:
                assert one.samples == micro.samples and one.num_images == micro.num_images
                for name in (
                    "input_ids",
                    "labels",
                    "position_ids",
                    "media_positions",
                    "cu_seqlens",
                ):
                    assert torch.equal(getattr(one.batch, name), getattr(micro.batch, name))
            if micro.batch.media is None:
                assert all(one.batch.media is None for one in theirs)
                continue
            counts = [t * h * w for t, h, w in micro.batch.media.grid_thw]
            expected = micro.batch.media.pixel_values.split(counts)
            seen = []
            for one in theirs:
                media = one.batch.media
                own = [k for k, is_mine in enumerate(media.owners.mine) if is_mine]
                seen += own
                assert media.grid_thw == micro.batch.media.grid_thw
                wanted = [expected[k] for k in own] or [expected[0][:0]]
                assert torch.equal(media.pixel_values, torch.cat(wanted))
            assert sorted(seen) == list(range(len(counts))), "each image once in the replica"


@pytest.mark.parametrize(("size", "stages"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_shares_are_the_rows_of_one_process(tmp_path: Path, size: int, stages: int) -> None:
    pattern = write(tmp_path)
    alone = steps_of(opened(pattern, tmp_path / "index"))
    all_ranks = replica(size, stages=stages)
    found, _ = together(tmp_path, pattern, all_ranks)
    assert_one_row(alone, found)
    for ranks in all_ranks:
        assert ranks.votes == [8] * (STEPS + 1), "8 bytes a step, and one for the end"
        assert ranks.told == []
        is_later = ranks.rank >= size // stages
        held = sum(
            micro.batch.media.pixel_values.nbytes
            for step in found[ranks.rank]
            for micro in step.micro_batches
            if micro.batch.media is not None
        )
        assert (held == 0) == is_later, "stages beyond the first get no pixels"


def cut(wanted: set[tuple[int, int]]) -> Damage:
    return lambda sample, image, data: data[: len(data) // 2] if (sample, image) in wanted else data


@pytest.mark.cases(slow=("bad0-4-1", "bad1-2-2", "bad2-2-1"))
@pytest.mark.parametrize(("size", "stages"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("bad", [{(3, 2)}, {(7, 0), (7, 2)}, {(3, 0), (3, 1), (6, 1), (11, 2)}])
def test_a_bad_image_is_a_hole_of_all(tmp_path: Path, size: int, stages: int, bad) -> None:
    pattern = write(tmp_path, cut(bad))
    ledger = Ledger(None)
    alone = steps_of(opened(pattern, tmp_path / "index", ledger=ledger))
    assert {hole.number for step in alone for hole in step.skipped} == {n for n, _ in bad}
    all_ranks = replica(size, stages=stages)
    found, ledgers = together(tmp_path, pattern, all_ranks)
    assert_one_row(alone, found)
    assert ledgers[0].lines() == ledger.lines(), "the first of a sample's faults, as one meets it"
    assert all(other.lines() == [] for other in ledgers[1:]), "written down once"
    for ranks in all_ranks:
        assert set(ranks.votes) == {8} and len(ranks.votes) == STEPS + 1 + len(ranks.told)


def test_an_image_of_one_beats_the_text_of_all(tmp_path: Path) -> None:
    """A sample with a bad image and a text that cannot be encoded: one process decodes first, and
    `decode` is skipped, where `schema` would end the run."""
    pattern = write(tmp_path, cut({(3, 1)}))
    real = Encoder._tokens

    def refusing(self: Encoder, sample: Any, layouts: Any) -> Any:
        if sample.key == "s003":
            raise DataError("a text that nobody can render", error_class="schema")
        return real(self, sample, layouts)

    data = opened(pattern, tmp_path / "index")  # lengths are known before
    assert data.fitted.eligible.all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Encoder, "_tokens", refusing)
        alone = steps_of(opened(pattern, tmp_path / "index"))
        assert any(step.skipped for step in alone)
        found, _ = together(tmp_path, pattern, replica(4))
    assert_one_row(alone, found)


def test_an_error_that_is_not_skipped_ends_all(tmp_path: Path) -> None:
    pattern = write(tmp_path, cut({(7, 2)}))
    policy = OnErrorSection(decode="raise")
    with pytest.raises(DataError) as alone:
        steps_of(opened(pattern, tmp_path / "index", on_error=policy))
    found, ledgers = together(tmp_path, pattern, replica(4), on_error=policy)
    assert [str(error) for error in found] == [str(alone.value)] * 4
    assert {type(error) for error in found} == {DataError}
    assert all(ledger.lines() == [] for ledger in ledgers)


class Failing:
    """A reader whose bytes fail in one process, of one sample."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, key: str, error: Exception) -> None:
        self.dataset: BinDataset | None = None
        read = BinDataset.read

        def failing(dataset: BinDataset, request: Any) -> list[Any]:
            found = list(read(dataset, request))
            if dataset is self.dataset:
                for place, ref in enumerate(request.samples):
                    if ref.key == key and not isinstance(error, DataError):
                        raise error
                    if ref.key == key:
                        found[place] = error
            return found

        monkeypatch.setattr(BinDataset, "read", failing)

    def in_rank(self, rank: int, tmp_path: Path, pattern: str, **more: Any) -> list[Any]:
        def read(ranks: PlayedRanks) -> list[GlobalStep]:
            data = opened(pattern, tmp_path / "index", **more)
            if ranks.rank == rank:
                self.dataset = data.dataset
            return steps_of(data, ranks)

        return in_threads(replica(4, seconds=30), read)


def test_a_store_that_fails_one_process(tmp_path: Path, monkeypatch) -> None:
    """Skipped, the sample is a hole of all; not skipped, all end with the cause."""
    pattern = write(tmp_path)
    gone = DataError("the store is away", error_class="transport")
    failing = Failing(monkeypatch, key="s006", error=gone)
    found = failing.in_rank(2, tmp_path, pattern)
    alone = steps_of(opened(write(tmp_path / "b", lambda n, _, d: d), tmp_path / "i"))
    assert alone[0].num_samples == found[0][0].num_samples
    for steps in found:
        holes = [hole for step in steps for hole in step.skipped]
        assert {(hole.key, hole.reason) for hole in holes} == {("s006", "the store is away")}
        keys = [s.key for step in steps for m in step.micro_batches for s in m.samples]
        assert "s006" not in keys and len(keys) + len(holes) == STEPS * 8 - 4 * (STEPS > 1)
    raised = failing.in_rank(2, tmp_path, pattern, on_error=OnErrorSection())
    assert all("the store is away" in str(error) and "s006" in str(error) for error in raised)


def test_a_reader_that_breaks_in_one_process_ends_all(tmp_path: Path, monkeypatch) -> None:
    pattern = write(tmp_path)
    failing = Failing(monkeypatch, key="s006", error=ZeroDivisionError("a bug in one process"))
    found = failing.in_rank(3, tmp_path, pattern)
    assert [(type(error), str(error)) for error in found] == [
        (ZeroDivisionError, "a bug in one process")
    ] * 4
    place = "process 3 of the 4 that train these rows together (rank 3 on "
    assert all(error.__notes__[0].startswith(f"met by {place}") for error in found)


def test_a_dead_worker_of_one_process_is_told_with_its_place(tmp_path: Path) -> None:
    def read(ranks: PlayedRanks) -> Any:
        fault = DataError("a loader process ended", error_class="transport")
        step = None if ranks.rank == 1 else []
        return replica_module.agreed_step(
            step, fault if ranks.rank == 1 else None, ranks, lambda request: None, SKIP
        )

    found = in_threads(replica(2), read)
    place = f"that train these rows together (rank 1 on {socket.gethostname()})"
    message = f"process 1 of the 2 {place}: a loader process ended"
    assert [str(error) for error in found] == [message] * 2


def test_what_fails_before_the_first_step_ends_all(tmp_path: Path) -> None:
    pattern = write(tmp_path)

    def read(ranks: PlayedRanks) -> Any:
        if ranks.rank == 1:
            replica_module.raise_in_replica(ValueError("no workers here"), ranks)
        return steps_of(opened(pattern, tmp_path / "index"), ranks)

    found = in_threads(replica(2), read)
    assert [str(error) for error in found] == ["no workers here"] * 2


def test_processes_that_see_other_data_say_so(tmp_path: Path) -> None:
    """Another seed, another tokenizer: they would train other rows with one model."""
    pattern = write(tmp_path)

    def planned(ranks: PlayedRanks) -> Any:
        return steps_of(opened(pattern, tmp_path / "index", seed=7 + ranks.rank), ranks)

    found = in_threads(replica(2), planned)
    assert all("planned different steps" in str(error) for error in found)

    def ended(ranks: PlayedRanks) -> Any:
        return steps_of(opened(pattern, tmp_path / "index"), ranks, steps=1 + ranks.rank)

    found = in_threads(replica(2), ended)
    assert all("planned different steps" in str(error) for error in found)

    def made(ranks: PlayedRanks) -> Any:
        data = opened(pattern, tmp_path / "index")
        load = data.dataset.load

        def other(request: Any) -> Any:
            micro = load(request)
            return replace(micro, digest=micro.digest + b"!" * ranks.rank)

        data.dataset.load = other
        return steps_of(data, ranks)

    found = in_threads(replica(2), made)
    assert all("made different rows of the same samples" in str(error) for error in found)


def pairs_of(folder: Path) -> Callable[[], TrainData]:
    pattern = str(write_pairs(folder / "pairs.tar", raw_pairs()))
    encoder = Encoder(TINY_MODEL).replace(pairs=True)
    return lambda: opened(
        pattern, folder / "index", encoder=encoder, micro_batch_size=2, global_batch_size=2
    )


def referenced(data: TrainData) -> Any:
    """What a reference model might say of its pairs."""
    return np.arange(2.0 * data.fitted.eligible.size).reshape(-1, 2)


def test_what_stands_beside_a_row_is_voted_on(tmp_path: Path) -> None:
    """Another reference or other sources on one process: it would train another loss."""
    open_pairs = pairs_of(tmp_path)

    def read(ranks: PlayedRanks, *, reference: float = 0.0, source: int = 0) -> Any:
        data = open_pairs()
        data.kept["reference"] = referenced(data)
        data.kept["reference"][:, 1] += reference * ranks.rank
        data._sources = [source * ranks.rank]
        return steps_of(data, ranks)

    found = in_threads(replica(2), read)
    for steps in found:
        batches = [micro.batch for step in steps for micro in step.micro_batches]
        assert batches and all(batch.reference is not None for batch in batches)
        assert all(batch.sources is not None for batch in batches)
    for other in ({"reference": 1e-12}, {"source": 1}):
        found = in_threads(replica(2), partial(read, **other))
        assert all("made different rows of the same samples" in str(error) for error in found)


def test_a_pair_that_one_reference_lacks_ends_all(tmp_path: Path) -> None:
    open_pairs = pairs_of(tmp_path)

    def read(ranks: PlayedRanks) -> Any:
        data = open_pairs()
        data.kept["reference"] = referenced(data)
        data.kept["reference"][2:] += math.nan if ranks.rank == 1 else 0.0
        return steps_of(data, ranks)

    found = in_threads(replica(2), read)
    assert all(isinstance(error, ReferenceCacheError) for error in found)
    assert all("has no log-probabilities" in str(error) for error in found)


def test_without_the_vote_the_rows_differ(tmp_path: Path, monkeypatch) -> None:
    """The vote is what makes the hole of one a hole of all."""
    pattern = write(tmp_path, cut({(3, 2)}))
    monkeypatch.setattr(replica_module, "_all_say", lambda vote, ranks: True)
    found, _ = together(tmp_path, pattern, replica(2))
    samples = [[m.samples for step in steps for m in step.micro_batches] for steps in found]
    assert samples[0] != samples[1]


def test_a_process_that_leaves_the_vote_out_is_waited_for_no_longer_than_the_timeout(
    tmp_path: Path, monkeypatch
) -> None:
    pattern = write(tmp_path)
    real = replica_module._all_say

    def silent(vote: int, ranks: Any) -> bool:
        return ranks.rank == 1 or real(vote, ranks)

    monkeypatch.setattr(replica_module, "_all_say", silent)

    def read(ranks: PlayedRanks) -> Any:
        return steps_of(opened(pattern, tmp_path / "index"), ranks)

    found = in_threads(replica(2, seconds=0.5), read)
    assert isinstance(found[0], VlmpackError) and isinstance(found[1], list)
    assert "2 processes of a replica could not agree on the rows of a step" in str(found[0])


def test_errors_that_cannot_travel_are_told_in_words(tmp_path: Path) -> None:
    class Local(Exception):
        """Of a class that another process cannot find."""

    told = replica_module._picklable(Local("what it says"))
    assert str(told) == "Local: what it says"
    assert replica_module._picklable(None) is None


def test_validation_is_shared_out_too(tmp_path: Path) -> None:
    pattern = write(tmp_path, cut({(3, 2)}))
    ledgers = [Ledger(None) for _ in range(2)]

    def read(ranks: PlayedRanks) -> Any:
        data = opened(pattern, tmp_path / "index", ledger=ledgers[ranks.rank])
        return [
            *data.eval_batches(rank=0, dp=1, replica=ranks),
            *data.numbered_batches([0, 3, 7], rank=0, dp=1, replica=ranks),
        ]

    data = opened(pattern, tmp_path / "index")
    alone = [*data.eval_batches(rank=0, dp=1), *data.numbered_batches([0, 3, 7], rank=0, dp=1)]
    found = in_threads(replica(2), read)
    assert [[m.samples for m in each] for each in found] == [[m.samples for m in alone]] * 2
    assert [[m.skipped for m in each] for each in found] == [[m.skipped for m in alone]] * 2
    assert [len(ledger.lines()) for ledger in ledgers] == [1, 0]
    images = sum(len(m.batch.media.owners.ranks) for m in found[0] if m.batch.media is not None)
    own = [sum(sum(m.batch.media.owners.mine) for m in e if m.batch.media) for e in found]
    assert sum(own) == images and min(own) > 0
