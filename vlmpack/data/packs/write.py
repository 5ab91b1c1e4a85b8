"""`vlmpack pack`: which samples share a pack, and the folder that holds the packs.

    stream    the rows of the online plan's first epoch, as they are
    bfd       best-fit-decreasing over all samples, or inside each global batch of that plan

pack.json comes last, by one rename. Without it the folder is unfinished, and the same command
continues it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vlmpack.data.config import DataConfig
from vlmpack.data.index.parts import Progress
from vlmpack.data.index.shard_pool import each_shard
from vlmpack.data.index.table import Fitted, Int64s, SampleTable
from vlmpack.data.loading.loader import BinDataset
from vlmpack.data.modes import PackingMode
from vlmpack.data.packs.manifest import (
    ARRAYS,
    MANIFEST,
    SAMPLES,
    UNFINISHED,
    Kind,
    Manifest,
    MediaForm,
    PackSpans,
    Planner,
    digest,
    flat_differences,
    index_identity,
    refuse_rollouts,
    save_arrays,
    save_samples,
    take_seal,
)
from vlmpack.data.packs.spans import (
    PartFacts,
    PartJob,
    WritePart,
    facts_path,
    read_facts,
    refuse_videos,
    tar_name,
)
from vlmpack.data.plan.packers import Bin, BudgetPacker, held_tokens
from vlmpack.data.plan.packs import PackArrays
from vlmpack.data.plan.windows import WindowPlan
from vlmpack.data.splits.growing_index import SHARD_STRIDE
from vlmpack.data.splits.indexed import PreparedSplit, prepare_split
from vlmpack.data.splits.split import Split, first_epoch
from vlmpack.data.splits.summary import name_unknown_keys
from vlmpack.data.splits.survey import Survey, build_settings, list_shards, make_builder
from vlmpack.errors import UNREADABLE, PacksError
from vlmpack.file_format import FORMAT, PACKS
from vlmpack.whole_file import read_json, write_atomically
from vlmpack.words import indented


def choose_packs(split: Split, fitted: Fitted, planner: Planner, mode: PackingMode) -> PackArrays:
    """The packs of one epoch.

    Args:
        split: in a mode that plans rows; its first epoch says which samples there are, and how
            often.
        fitted: the same samples, numbered from 0 in index order, as packs number them.
        planner: `stream` keeps the epoch's rows and global batches as they are.
        mode: what a pack holds, and whether it stays inside the epoch's global batches.
    """
    windows = _windows(split, fitted)
    if planner == "stream":
        return PackArrays.of(windows)
    budget = mode.budget

    def packed(draws: Int64s) -> list[Int64s]:
        draws = np.sort(draws)
        planned = budget.planned(fitted.table.sequence_tokens(draws))
        return [draws[n] for n in budget.packs(planned, fitted.table.num_patches[draws])]

    if mode.packing.counts_rows:
        return PackArrays.unordered(packed(PackArrays.of(windows).numbers))
    return PackArrays.of(
        [
            [tuple(map(_bin, packed(np.concatenate(batch)))) for batch in window]
            for window in windows
        ]
    )


def largest_buffer(arrays: PackArrays, fitted: Fitted, mode: PackingMode) -> int:
    """The most samples in a window or global batch that packs are chosen from."""
    packs = arrays.batches if mode.packing.packs_by_batch else arrays.batches[arrays.windows]
    inner = arrays.starts[packs][1:-1].tolist()
    tokens = mode.budget.planned(fitted.table.sequence_tokens(arrays.numbers))
    return max(map(mode.waiting, np.split(tokens, inner)))


def _bin(samples: Int64s) -> Bin:
    numbers: list[int] = samples.tolist()
    return tuple(numbers)


def _windows(split: Split, fitted: Fitted) -> list[list[tuple[Bin, ...]]]:
    """The packs of the global batches of each window of epoch 0."""
    windows: list[list[tuple[Bin, ...]]] = []
    place = -1
    for batch in first_epoch(split):
        if batch.position.window != place:
            windows.append([])
            place = batch.position.window
        windows[-1].append(_renumbered(split, fitted, batch.bins))
    return windows


def _renumbered(split: Split, fitted: Fitted, bins: Sequence[Bin]) -> tuple[Bin, ...]:
    """Bins with the samples' places in index order; a streamed plan numbers them by shard."""
    if not isinstance(split.plan, WindowPlan):
        return tuple(bins)
    starts: Int64s = fitted.table.shard_starts
    return tuple(
        tuple(int(starts[number // SHARD_STRIDE]) + number % SHARD_STRIDE for number in samples)
        for samples in bins
    )


PART_BYTES = 64 << 20
"""About what one tar holds."""
TOKEN_BYTES = 24
"""Bytes of a saved token, three position axes included."""


def part_bounds(table: SampleTable, arrays: PackArrays, part_packs: int) -> list[int]:
    """(F + 1,) packs before each tar of about PART_BYTES, from the index alone."""
    numbers = arrays.numbers
    sizes = table.lengths[numbers] + TOKEN_BYTES * table.num_tokens[numbers]
    before = np.concatenate(([0], np.cumsum(sizes)))
    cuts = [0]
    while cuts[-1] < arrays.num_packs:
        first = cuts[-1]
        full = before[arrays.starts[first]] + PART_BYTES
        reached = int(np.searchsorted(before[arrays.starts], full, side="right")) - 1
        cuts.append(min(max(first + 1, reached), first + part_packs, arrays.num_packs))
    return cuts


def part_jobs(table: SampleTable, arrays: PackArrays, cuts: Sequence[int]) -> Iterator[PartJob]:
    """Jobs are made one at a time, since each holds what a process needs of every sample."""
    for number, (first, stop) in enumerate(pairwise(cuts)):
        packs = tuple(
            tuple(table.ref(sample) for sample in arrays.members(pack))
            for pack in range(first, stop)
        )
        yield PartJob(number, first, packs)


HOLES = "holes.json"
PRELOAD = ("vlmpack.data.packs.spans",)

PART_PACKS = 256
"""Packs in a tar at most, by default."""

OnPacks = Callable[[int, int, int], None]
"""(packs done now, packs in all, bytes they take)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOrder:
    """The packs to make."""

    kind: Kind = "plan"
    planner: Planner = "stream"
    media: MediaForm = "original"
    processes: int = 1
    part_packs: int = PART_PACKS
    on_index: Progress | None = None
    on_packs: OnPacks | None = None


@dataclass(frozen=True, slots=True)
class PackSource:
    """The source of packs: a split in a mode that plans rows, and a reader of its samples."""

    config: DataConfig
    split: Split
    dataset: BinDataset


def make_packs(source: PackSource, folder: Path, order: PackOrder) -> Manifest:
    """Packs a split into a folder.

    Raises:
        PacksError: the folder is not empty, is in use, cannot be written, or holds unfinished packs
            of other settings.
        DataError: a video, where its pixels would be saved; a sample that cannot be encoded and may
            not be left out.
    """
    refuse_rollouts(source.dataset.encoder, order.kind)
    packer = source.split.plan.packer
    shares = isinstance(packer, BudgetPacker) and packer.planned is not None
    if shares and order.planner != "stream":
        raise PacksError(
            f"--planner {order.planner}: orders samples by size, but with packing.share_prefix: "
            "true samples of one prefix stay together. Use --planner stream, or false"
        )
    with _claimed(folder):
        config = source.config
        source.split.index_all()
        survey = Survey(list_shards(config, source.dataset.reader.fetcher), "global")
        builder = make_builder(config, source.dataset.encoder, source.dataset.reader.fetcher)
        # The split's samples in index order, whichever way it is planned.
        prepared = prepare_split(config, survey, builder, build_settings(config, order.on_index))
        if order.kind != "plan" and not source.config.data.on_error.skips("schema"):
            refuse_videos(prepared.fitted, builder.lengths.index, build_settings(config, None))
        name_unknown_keys({"data.train": prepared.fitted.table.unknown_keys})
        mode = config.mode
        arrays = choose_packs(source.split, prepared.fitted, order.planner, mode)
        manifest = _manifest(source, order, prepared, arrays)
        if shares:
            held = held_tokens(prepared.fitted.table, arrays.each(), mode.budget.alignment)
            manifest = replace(manifest, share_prefix=True, num_tokens=held)
        try:
            _start_folder(folder, manifest, order.part_packs)
            facts: list[PartFacts] = []
            if order.kind != "plan":
                facts = _write_parts(source, folder, order, prepared.fitted, arrays)
            return _finish(folder, manifest, prepared.fitted, arrays, facts)
        except OSError as error:
            raise PacksError(f"-o {folder}: cannot be written: {error}") from error


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """The folder, made, looked at, and locked while it is worked on."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise PacksError(f"-o {folder}: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PacksError(f"-o {folder}: another process packs into it") from None
        names = sorted(path.name for path in folder.iterdir())
        if MANIFEST in names:
            raise PacksError(
                f"-o {folder}: holds finished packs ({MANIFEST}); choose another folder, or delete "
                "this one"
            )
        if names and UNFINISHED not in names and not all(_is_scrap(name) for name in names):
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            raise PacksError(f"-o {folder}: is not empty ({shown}); choose a new folder")
        yield
    finally:
        os.close(descriptor)


def _is_scrap(name: str) -> bool:
    """The unfinished file that a killed process leaves."""
    return _SCRAP.fullmatch(name) is not None


_OURS = "|".join(map(re.escape, (MANIFEST, UNFINISHED, HOLES, SAMPLES, ARRAYS)))
_SCRAP = re.compile(rf"\.({_OURS}|packs-\d{{6,}}\.(tar|json))\.[^/]+\.tmp")


def _manifest(
    source: PackSource, order: PackOrder, prepared: PreparedSplit, arrays: PackArrays
) -> Manifest:
    config = source.config
    return Manifest(
        kind=order.kind,
        planner=order.planner,
        media=order.media if order.kind == "shards" else None,
        budget=replace(
            config.mode.budget, buffer=largest_buffer(arrays, prepared.fitted, config.mode)
        ),
        seq_length=config.training.seq_length,
        seed=config.training.seed,
        shuffle=str(source.split.identity["data.shuffle"]),
        global_batch_size=config.training.global_batch_size,
        num_samples=int(arrays.numbers.shape[0]),
        num_packs=arrays.num_packs,
        num_tokens=int(prepared.fitted.table.num_tokens[arrays.numbers].sum()),
        encoder=dict(source.dataset.encoder.fingerprint_parts),
        data=index_identity(prepared.identity, config.key),
        sources=tuple((source.name, source.weight) for source in config.sources),
        weights=config.weights,
        packs_by_batch=config.mode.packing.packs_by_batch,
        plan=arrays.fingerprint,
        files={},
    )


def _start_folder(folder: Path, manifest: Manifest, part_packs: int) -> None:
    """Write down what is being made, or find that the same was started before."""
    path = folder / UNFINISHED
    making = json.loads(manifest.to_json())
    take_seal(making)
    making |= {"cut": f"{PART_BYTES} bytes, {part_packs} packs"}
    if path.is_file():
        try:
            saved = read_json(path)
        except UNREADABLE as error:
            raise PacksError(f"-o {folder}: {path.name} cannot be read: {error!r}") from error
        if refusal := PACKS.refusal(saved.get(FORMAT), f"-o {folder}: {path.name}"):
            raise PacksError(refusal)
        if lines := flat_differences(saved, making):
            raise PacksError(
                f"-o {folder}: holds unfinished packs that were started with other settings:\n"
                f"{indented(lines)}\nChoose another folder, or delete this one."
            )
    else:
        write_atomically(path, json.dumps(making).encode())
    for scrap in folder.iterdir():
        if _is_scrap(scrap.name):
            scrap.unlink()


def _write_parts(
    source: PackSource, folder: Path, order: PackOrder, fitted: Fitted, arrays: PackArrays
) -> list[PartFacts]:
    work = WritePart(
        folder=folder,
        dataset=source.dataset,
        kind=order.kind,
        media=order.media,
        num_axes=source.dataset.encoder.num_position_axes,
    )
    cuts = part_bounds(fitted.table, arrays, order.part_packs)
    num_parts = len(cuts) - 1
    for facts in each_shard(
        work,
        part_jobs(fitted.table, arrays, cuts),
        processes=min(order.processes, num_parts),
        preload=(*PRELOAD, *source.config.workers.preload),
        in_order=False,
        remedy="run `vlmpack pack` again with fewer --processes; it goes on where it was",
    ):
        if order.on_packs is not None:
            order.on_packs(facts.num_packs, arrays.num_packs, facts.num_bytes)
    parts = [read_facts(folder, number) for number in range(num_parts)]
    assert all(facts is not None for facts in parts)
    return [facts for facts in parts if facts is not None]


def _finish(
    folder: Path, manifest: Manifest, fitted: Fitted, arrays: PackArrays, facts: Sequence[PartFacts]
) -> Manifest:
    """Write the small files, then pack.json. Then remove what was needed to continue."""
    spans = None
    files: dict[str, str | int] = {tar_name(part.number): part.num_bytes for part in facts}
    small: dict[str, bytes] = {}
    holes = {number: hole for part in facts for number, hole in part.holes.items()}
    if manifest.kind != "plan":
        spans = PackSpans(
            files=np.repeat([part.number for part in facts], [part.num_packs for part in facts]),
            offsets=_joined(part.offsets for part in facts),
            lengths=_joined(part.lengths for part in facts),
            crc32s=_joined(part.crc32s for part in facts),
        )
        small[HOLES] = json.dumps(holes, sort_keys=True).encode()
    if manifest.kind == "shards":
        small[SAMPLES] = save_samples(fitted)
    small[ARRAYS] = save_arrays(arrays, spans)
    for name, data in small.items():
        write_atomically(folder / name, data)
        files[name] = digest(data)
    whole = replace(
        manifest,
        files=files,
        num_holes=len(holes),
        num_kept_original=sum(part.num_kept_original for part in facts),
    )
    write_atomically(folder / MANIFEST, whole.to_json().encode())
    for part in facts:
        facts_path(folder, part.number).unlink()
    (folder / UNFINISHED).unlink()
    return whole


def _joined(columns: Iterable[Sequence[int]]) -> Any:
    return np.asarray([*chain.from_iterable(columns)], dtype=np.int64)
